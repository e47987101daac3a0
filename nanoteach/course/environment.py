"""The environment in which notebooks are built and tested: the same on every machine."""

from pathlib import Path


def notebook_environment(progress: Path) -> dict[str, str]:
    """Always `tiny`, on the CPU, an empty progress folder, and libraries that keep quiet."""
    return {
        "NANOTEACH_MODEL": "tiny",
        "NANOTEACH_DEVICE": "cpu",
        "NANOTEACH_PROGRESS": str(progress),
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
