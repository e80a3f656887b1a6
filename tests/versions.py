"""``make versions``: an environment for each of some sets of releases, and a slice of the suite in it; writes docs/versions.md.

Requirements that a set leaves open are met by the newest releases. An environment that is there is used again.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "versions.md"
TESTS = (
    *("pytest>=8,<9.2", "pytest-timeout", "pytest-xdist", "hypothesis", "peft>=0.17", "einops", "tensorboard"),
    *("lion-pytorch", "schedulefree", "pytorch-optimizer"),
)
SETS: dict[str, tuple[str, ...]] = {
    "oldest": ("torch==2.8.0", "lightning==2.4.0", "transformers==4.56.0", "pydantic==2.10.0", "omegaconf==2.3.0"),
    "torch-2.11": ("torch==2.11.0", "lightning==2.5.0.post0", "transformers==4.56.0"),
    "lightning-2.5": ("torch==2.13.0", "lightning==2.5.5", "transformers>=5"),
    "newest": ("torch", "lightning", "transformers"),
}
SLICE = {
    "distributed": "collectives column_groups groups layers logits seq_part",
    "end_to_end": "parity context fsdp pipeline_parity recompute compile vocabulary checkpoint folder families optimizers "
    "precision random training verify fabric",
    "ways_in": "either_lightning",
}
"""Files of the suite by folder, beside the unit tests; of each what ``make test`` runs."""
OLD_TORCH = (
    "fsdp or compile or seq_part or grids_over_parts or habits_of_training or few_kernels or test_describe or cp2-all or "
    "feature_table or test_sizing or grouped_products or experts_are_proved"
)
OLD_LIBRARIES = (
    "test_huggingface or user_loss or shipped or shrunk or t5-user or lora or no_model or between_files or schema_is_fresh"
)
LEFT_OUT = dict.fromkeys(("oldest", "torch-2.11"), f"{OLD_TORCH} or {OLD_LIBRARIES}")
"""Of older releases: what is refused with them by name, or tests by means that they lack."""
SHOWN = ("torch", "lightning", "transformers", "pydantic", "omegaconf")


def make(name: str, python: str) -> Path:
    """The Python of an environment with a set of releases, made where it is not there yet."""
    folder = ROOT / f".venv-{name}"
    inside = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        # torch first, so that nothing pulls another one; then the releases of the set beside all other requirements.
        beside = (*TESTS, "pytorch-lightning" + SETS[name][1].removeprefix("lightning"), "--editable", ".[cli,hydra,hf,plot]")
        for what in (SETS[name][:1], (*SETS[name], *beside)):
            subprocess.run([inside, "-m", "pip", "install", "--quiet", *what], cwd=ROOT, check=True)
        (folder / ".installed").touch()
    return inside


def releases(python: Path) -> list[str]:
    """The release of Python and of each package that the table shows."""
    code = f"import sys; from importlib.metadata import version; print(sys.version.split()[0], *map(version, {SHOWN}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test(name: str, python: Path, options: Sequence[str]) -> tuple[str, float, bool]:
    """Run the slice; what pytest counts, the seconds that it took, and whether all is well."""
    begun = time.monotonic()
    how = ("-m", "not matrix and not more", "--numprocesses", "2", "--dist", "loadgroup", "-p", "no:cacheprovider")
    files = ["tests/unit", *(f"tests/{at}/test_{file}.py" for at, files in SLICE.items() for file in files.split())]
    if name in LEFT_OUT:
        how = (*how, "-k", f"not ({LEFT_OUT[name]})")
    command = [str(python), "-m", "pytest", *files, *how, *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            sys.stdout.write(line)
            last = line.strip() or last
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|errors?|skipped)", last))
    return counts, time.monotonic() - begun, process.returncode == 0


def main() -> int:
    """Runs the command line; 1 if a set has a test that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", default=["oldest", "newest"], choices=list(SETS))
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="of each set, or one of all")
    given, options = parser.parse_known_args()
    pythons = given.python * len(given.sets) if len(given.python) == 1 else given.python
    rows = dict(re.findall(r"^\| ([\w.-]+) (\|.*)$", TABLE.read_text(), re.MULTILINE)) if TABLE.exists() else {}
    good = True
    for name, python in zip(given.sets, pythons, strict=True):
        inside = make(name, python)
        counts, seconds, is_good = test(name, inside, options)
        good = good and is_good
        rows[name] = f"| {' | '.join(releases(inside))} | {counts} | {seconds:.0f} |"
    head = "".join(f" {each} |" for each in ("set", "Python", *SHOWN, "tests", "s"))
    table = "\n".join(f"| {name} {rows[name]}" for name in SETS if name in rows)
    text = TABLE.read_text() if TABLE.exists() else "# Releases\n\n| set |\n"
    table = f"|{head}\n|{' --- |' * (4 + len(SHOWN))}\n{table}"
    TABLE.write_text(re.sub(r"(?s)\| set \|.*?(?=\n\n|\Z)", table, text).rstrip() + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
