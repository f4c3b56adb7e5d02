"""Options that several commands share."""

from typing import Annotated, Literal

import typer

Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated.")]
Device = Annotated[str, typer.Option(help="Of the target: cpu, cuda, one of several as cuda:1; auto: a GPU where there is one.")]
Dtype = Annotated[str, typer.Option(help="Of the target: float32, bfloat16 or float16.")]
Attention = Annotated[
    Literal["auto", "torch", "triton"], typer.Option(help="Of tree nodes: triton's kernel or torch's masks; auto: the kernel on a GPU.")
]
Placement = Annotated[
    Literal["rank", "fsdp2", "tp", "zero3", "device_map"],
    typer.Option(
        help="Of the target on several processes: whole on each (rank), sharded (fsdp2, zero3), or every product split (tp); or of one "
        "process over all devices, layer by layer (device_map)."
    ),
]
TpSize = Annotated[int | None, typer.Option(min=1, help="Processes that share a copy of the target, with --placement tp (default: all).")]
Bits = Annotated[Literal["8bit", "4bit"] | None, typer.Option("--quantization", help="Of the target's linear layers.")]
