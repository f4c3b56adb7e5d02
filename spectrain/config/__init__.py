"""Settings of every stage: one frozen model a stage, unknown keys refused, YAML in and out. Every default is written here."""

from spectrain.config.bench import BenchConfig
from spectrain.config.data import AnswersConfig, CaptureConfig, DataConfig, PrepareConfig, RegenerateConfig, TargetConfig
from spectrain.config.evaluation import EvaluationConfig, ShapeConfig, Suite
from spectrain.config.files import Stage, dump_yaml, load_config, override, parse_yaml, validate
from spectrain.config.training import HeadConfig, LoraConfig, LossConfig, TrainingConfig

__all__ = [
    "AnswersConfig", "BenchConfig", "CaptureConfig", "DataConfig", "EvaluationConfig", "HeadConfig", "LoraConfig", "LossConfig",
    "PrepareConfig", "Recipe", "RegenerateConfig", "ShapeConfig", "Stage", "Suite", "TargetConfig", "TrainingConfig", "dump_yaml",
    "load_config", "override", "parse_yaml", "validate",
]  # fmt: skip


class Recipe(Stage):
    """Everything that a run needs. `name` and `note` are for people."""

    name: str
    note: str = ""
    target: TargetConfig
    data: DataConfig
    head: HeadConfig = HeadConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
