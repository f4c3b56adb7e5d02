"""What a person sees of a running training: a progress bar, lines of measured points, `metrics.jsonl`, and trackers of accelerate."""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from spectrain.heads.losses import Counts


class Progress:
    """Reports on the main process only."""

    def __init__(self, total: int, done: int, accelerator: Accelerator, tracker: str, out: Path) -> None:
        self._main, self._accelerator, self._tracks = accelerator.is_main_process, accelerator, tracker != "none"
        self._bar = tqdm(total=total, initial=done, desc="train", unit="step", disable=None if self._main else True)
        self._file = out / "metrics.jsonl"
        if self._tracks:
            accelerator.init_trackers("spectrain")
        if self._main:
            out.mkdir(parents=True, exist_ok=True)

    def step(self, step: int, counts: Counts, *, lr: float) -> None:
        means = counts.means()
        self._bar.set_postfix(loss=f"{means['loss'][0]:.2f}", alpha=" ".join(f"{a:.2f}" for a in means["alpha"]), refresh=False)
        self._bar.update()
        if self._tracks:
            values = {f"{name}/{k}": v for name, column in means.items() for k, v in enumerate(column)}
            self._accelerator.log({**values, "lr": lr, "rows": float(counts.rows_K[0])}, step=step)

    def measured(self, point: dict[str, Any]) -> None:
        if not self._main:
            return
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")
        tau = "" if point["measured_tau"] is None else f", measured tau {point['measured_tau']:.3f}"
        alpha = " ".join(f"{a:.3f}" for a in point["alpha"])
        self.note(f"step {point['step']} ({point['minutes']:.1f} min): loss {point['loss']:.3f}, alpha {alpha}{tau}")
        if self._tracks and point["measured_tau"] is not None:
            self._accelerator.log({"measured_tau": point["measured_tau"]}, step=point["step"])

    def note(self, text: str) -> None:
        if self._main:
            self._bar.write(text)

    def close(self) -> None:
        self._bar.close()
        if self._tracks:
            self._accelerator.end_training()
