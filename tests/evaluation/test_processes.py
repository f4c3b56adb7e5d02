"""Processes that measure together: shares without padding. That they meet is held in tests/cli/test_evaluate_processes.py."""

import pytest

from spectrain.evaluation.processes import ALONE, Processes, open_processes


@pytest.mark.parametrize("number", [1, 2, 4, 9, 11])
def test_shares_are_padded(number: int) -> None:
    """DI2: nine examples with values 0 ... 8: their mean is 4, whatever the number of processes, and nobody has two more than another."""
    shares = [Processes(index, number).share(range(9)) for index in range(number)]
    values = [value for share in shares for value in share]
    assert sorted(values) == list(range(9)) and sum(values) / len(values) == 4.0
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [list(Processes(index, number, splits=False).share(range(9))) for index in range(number)] == [list(range(9))] * number


def test_one_process_needs_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with open_processes(splits=True) as processes:
        assert processes is ALONE and processes.leads and processes.device is None
    assert (processes.each(3), processes.gathered([1, 2]), processes.on_main(lambda: 5), processes.alike(lambda: 6)) == ([3], [1, 2], 5, 6)
    with pytest.raises(ValueError, match="its own"):
        processes.on_main(lambda: int("its own"))
