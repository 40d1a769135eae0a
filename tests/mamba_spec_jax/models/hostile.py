"""Loads folders and renders templates in a process of its own, and prints for each what it cost and what it said.

    python -m tests.mamba_spec_jax.models.hostile FOLDER

Every folder in FOLDER is a checkpoint, every `*.jinja` file there a chat template.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mamba_spec_jax as ms

MESSAGES = [{"role": "user", "content": "hello"}]


def render(path: Path) -> None:
    ms.ChatTemplate({"default": path.read_text()}, {}, path.name).render(MESSAGES)


def measured(act: Callable[[Path], object], path: Path) -> dict[str, object]:
    """Seconds of a core, bytes above those held before, and the error's kind and text; None for none."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest number of bytes held begins anew
    before, start, error = _status("VmRSS"), time.process_time(), None
    try:
        act(path)
    except Exception as raised:
        error = [type(raised).__name__, str(raised)]
    return {"seconds": time.process_time() - start, "bytes": _status("VmHWM") - before, "error": error}


def _status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main(folder: Path) -> None:
    paths = sorted(folder.iterdir())
    measured(render, folder / "warm.jinja")  # imports what rendering imports
    results = {path.name: measured(ms.load if path.is_dir() else render, path) for path in paths}
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
