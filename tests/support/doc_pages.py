"""Code blocks of the documentation.

A block of Python or of a shell is run by a test, unless a comment right before it says why not:

    <!-- no-test: needs a GPU -->

`<!-- no-test below: REASON -->` is about all blocks that follow it on the page.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
MARK = r"<!-- no-test(?P<below> below)?(?:: *(?P<reason>[^\n]*?))? *-->"
BLOCK = re.compile(rf"(?:{MARK}\s*)?^```(?P<kind>python|sh)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
OWN_TESTS = {"theory.md", "writing-a-task.md", "your-own-pair.md"}  # pages whose Python has tests of its own
NEEDS_COMMANDS = re.compile(r"from_pretrained\(\"models/|127\.0\.0\.1:8000")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


@dataclass(frozen=True)
class Block:
    """A block of code. `line` is that of its fence in the page; `reason` says why it is not run, None where it is."""

    kind: Literal["python", "sh"]
    code: str
    line: int
    reason: str | None = None

    @property
    def is_run(self) -> bool:
        return self.reason is None


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    below = re.search(r"<!-- no-test below: *([^\n]*?) *-->", text)
    blocks = []
    for match in BLOCK.finditer(text):
        is_marked = match[0].startswith("<!--")
        reason = (match["reason"] or "") if is_marked else None
        if below is not None and below.start() < match.start("kind"):
            reason = below[1]
        blocks.append(Block(match["kind"], match["code"], text.count("\n", 0, match.start("code")), reason))
    return blocks


def python_blocks(page: Path) -> list[Block]:
    """Return the Python blocks of a page that tests run."""
    return [block for block in blocks_of(page) if block.kind == "python" and block.is_run]


def shell_blocks(page: Path) -> list[Block]:
    """Return the shell blocks of a page that tests run."""
    return [block for block in blocks_of(page) if block.kind == "sh" and block.is_run]


def goes_with_commands(page: Path) -> bool:
    """Whether the Python of a page uses a model or a server that its commands would have made."""
    is_other = page.name in OWN_TESTS
    return not is_other and any(NEEDS_COMMANDS.search(block.code) for block in python_blocks(page))


def run_block(page: Path, block: Block, names: dict[str, Any]) -> None:
    """Run a block of Python. Tracebacks show the lines of the page."""
    exec(compile("\n" * block.line + block.code, page, "exec", dont_inherit=True), names)


def run_blocks(page: Path) -> dict[str, Any]:
    """Run the blocks of Python in order, in one namespace, and return it."""
    names: dict[str, Any] = {"__name__": page.stem.replace("-", "_")}
    for block in python_blocks(page):
        run_block(page, block, names)
    return names


def commands_of(block: Block) -> Iterator[list[str]]:
    """Yield the commands of a shell block as words, without variables before them and redirections after them."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        if "<" in words:
            words = words[: words.index("<")]
        if words:
            yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def write_speller(path: Path) -> None:
    """Write the task of the tutorial as a file, without the sections that check and run it."""
    text = (DOCS / "writing-a-task.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    kept = [section for section in sections if not section.startswith(("Check it\n", "Run it\n"))]
    code = [block for section in kept for block in re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)]
    path.write_text("\n\n".join(code), encoding="utf-8")
