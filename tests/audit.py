"""``make audit``: known vulnerabilities of the packages that are installed, as pip-audit finds them.

It fails for those that a release of the package fixes. Where no database of vulnerabilities can be reached it says so, and passes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

OWN = "lightning-seqpar"
SERVICES = ("pypi", "osv")
"""Databases that pip-audit knows, in the order in which they are tried."""


def installed() -> list[str]:
    """Every other package of this environment with its version, as databases know it: without what names a build (``+cpu``)."""
    versions = {each.metadata["Name"]: each.version.partition("+")[0] for each in distributions()}
    return sorted(f"{name}=={version}" for name, version in versions.items() if name and name.lower() != OWN)


def ask(service: str, packages: Sequence[str], options: Sequence[str]) -> list[dict[str, Any]] | None:
    """What a database says of each package; None if it can't be reached."""
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "packages.txt")).write_text("\n".join(packages))
        how = f"--no-deps --disable-pip --format json --progress-spinner off --vulnerability-service {service}".split()
        command = [sys.executable, "-m", "pip_audit", "--requirement", str(file), *how, *options]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    try:
        found: list[dict[str, Any]] = json.loads(output)["dependencies"]
    except ValueError:  # it has printed an error instead
        return None
    # A mirror of PyPI that serves packages alone knows none of them.
    return found if any("skip_reason" not in each for each in found) else None


def describe(found: Sequence[dict[str, Any]]) -> tuple[list[str], bool]:
    """A line for each vulnerability and one on all of them; and whether a release fixes one."""
    lines, fixable = [], False
    for package in found:
        for one in package.get("vulns", ()):
            names = " = ".join([one["id"], *one.get("aliases", ())])
            fixes = ", ".join(one["fix_versions"])
            fixable |= bool(fixes)
            lines.append(
                f"{package['name']} {package['version']}: {names}, {f'fixed in {fixes}' if fixes else 'which no release fixes yet'}"
            )
    unknown = [package["name"] for package in found if "skip_reason" in package]
    rest = f"; not known there: {', '.join(unknown)}" if unknown else ""
    count = f"{len(lines)} known vulnerabilit{'y' if len(lines) == 1 else 'ies'}"
    lines.append(f"audit: {len(found) - len(unknown)} packages, {count}{rest}")
    return lines, fixable


def main() -> int:
    """Ask the databases, one after the other, and say what they know."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ignore", action="append", default=[], metavar="ID", help="leave a vulnerability out")
    parser.add_argument("--osv-url", help="where the database osv is")
    given = parser.parse_args()
    if importlib.util.find_spec("pip_audit") is None:
        print("audit: pip-audit is not installed; make install")
        return 1
    options = [part for name in given.ignore for part in ("--ignore-vuln", name)]
    options += ["--osv-url", given.osv_url] if given.osv_url else []
    packages = installed()
    for service in SERVICES:
        found = ask(service, packages, options)
        if found is not None:
            lines, fixable = describe(found)
            print("\n".join(lines))
            return int(fixable)
    print(f"audit: no database of vulnerabilities can be reached ({', '.join(SERVICES)}), so nothing was looked up")
    return 0


if __name__ == "__main__":
    sys.exit(main())
