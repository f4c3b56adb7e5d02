"""A figure with the arithmetic that made it, in words that a person can check."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Term:
    """name: what it is. value: in bytes or seconds. how: the numbers that were multiplied, with their units."""

    name: str
    value: float
    how: str


def product(name: str, *factors: tuple[float, str]) -> Term:
    """The product of numbers that each have a unit or a name."""
    return Term(name, prod(number for number, _ in factors), " × ".join(f"{short(number)} {what}".strip() for number, what in factors))


def total(terms: Iterable[Term]) -> float:
    """The sum of their values."""
    return sum(term.value for term in terms)


def short(number: float) -> str:
    """A number for reading: whole below 100,000, else with four figures and a letter."""
    if number == int(number) and abs(number) < 1e5:
        return f"{int(number):,}"
    if abs(number) < 1e3:
        return f"{number:.3g}"
    for unit, letter in UNITS:
        if abs(number) >= unit:
            return f"{number / unit:.4g}{letter}"
    raise AssertionError
