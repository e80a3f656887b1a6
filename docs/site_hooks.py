"""What `make docs` does beside MkDocs: pages that lie outside of docs/, and tables made from the source.

The README is the home page. Whatever a page links to elsewhere in the repository becomes a page at the same path: Markdown as it
is, other text as code. So links that are right on a code host are right on the site.
"""

from __future__ import annotations

import ast
import html
import itertools
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MORE = ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md", "benchmarks/results/bench.md"]
"""Pages of the navigation that lie outside of docs/, beside the README."""
PICTURES = (".png", ".svg")
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^```.*?^```$|^~~~.*?^~~~$", re.M | re.S)
ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):<code>(~?)([\w.]+)</code>")


def uri_of(path: str) -> str:
    """Where a file of the repository lies on the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.endswith((".md", *PICTURES)) else f"{path}.md"


def path_of(uri: str) -> str:
    """The file of the repository that a page of the site shows."""
    if uri == "index.md":
        return "README.md"
    return f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri


def links(text: str) -> list[str]:
    """What a Markdown text links to by a relative path, outside of its blocks of code."""
    return [found[2] for found in LINK.finditer(FENCE.sub("", text))]


def outside() -> dict[str, str]:
    """Every file outside of docs/ that is on the site, with its address there."""
    seen: set[str] = set()
    waiting = ["README.md", *MORE, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    while waiting:
        path = waiting.pop()
        if path not in seen and (ROOT / path).is_file():
            seen.add(path)
            if path.endswith(".md"):
                folder = posixpath.dirname(path)
                waiting += [posixpath.normpath(posixpath.join(folder, link)) for link in links((ROOT / path).read_text())]
    return {path: uri_of(path) for path in sorted(seen) if not path.startswith("docs/")}


def as_code(path: str) -> str:
    """A page that shows a file of the repository."""
    language = {".py": "python", ".yaml": "yaml", ".json": "json", ".sbatch": "bash"}.get(Path(path).suffix, "text")
    return f"# {Path(path).name}\n\n`{path}`\n\n~~~~~ {language}\n{(ROOT / path).read_text()}~~~~~\n"


def on_files(files: Any, config: Any) -> Any:
    """Adds what lies outside of docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    for path, uri in outside().items():
        source: dict[str, Any] = {"abs_src_path": str(ROOT / path)}
        if not path.endswith((".md", *PICTURES)):
            source = {"content": as_code(path)}
        shown = InclusionLevel.INCLUDED if path == "README.md" or path in MORE else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, inclusion=shown, **source))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links between files of the repository into links between pages; fills in the tables."""
    path, uri = path_of(page.file.src_uri), page.file.src_uri

    def on_the_site(found: re.Match[str]) -> str:
        target = uri_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2])))
        return f"{found[1]}{posixpath.relpath(target, posixpath.dirname(uri) or '.')}{found[3] or ''}"

    if (ROOT / path).suffix == ".md":
        kept: list[str] = []
        markdown = FENCE.sub(lambda block: kept.append(block[0]) or f"\0{len(kept) - 1}\0", markdown)
        markdown = LINK.sub(on_the_site, markdown)
        markdown = re.sub(r"\0(\d+)\0", lambda block: kept[int(block[1])], markdown)
    return markdown.replace("<!-- the fields of ParallelConfig -->", options_table())


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Turns the roles in docstrings into links, where their object has a place on the site."""

    def link(found: re.Match[str]) -> str:
        name = found[2].rpartition(".")[2] if found[1] else found[2]
        return f'<autoref identifier="{html.escape(found[2])}" optional><code>{name}</code></autoref>'

    return ROLE.sub(link, content)


def options() -> list[tuple[str, str, str, str]]:
    """Name, type, default and docstring of each field of ``ParallelConfig``, read from its source."""
    tree = ast.parse((ROOT / "lightning_seqpar" / "config.py").read_text())
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ParallelConfig"]
    found = []
    for field, told in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(told, ast.Expr):
            default = ast.unparse(field.value) if field.value is not None else ""
            made = re.match(r"Field\(default(?:_factory)?=(\w+)", default)
            default = {"dict": "{}", "list": "[]"}.get(made[1], made[1]) if made else default
            text = " ".join(str(ast.literal_eval(told.value)).split()).replace("``", "`")
            found.append((field.target.id, ast.unparse(field.annotation).replace("'", '"'), default.replace("'", '"'), text))
    return found


def options_table() -> str:
    """The fields as a table in Markdown."""
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, kind, default, text in options():
        kind = re.sub(r"^Literal\[([^]]*)\]", lambda found: found[1].replace(", ", " or "), kind).replace("|", "or")
        lines.append(f"| `{name}` | `{kind}` | `{default}` | {text} |")
    return "\n".join(lines)
