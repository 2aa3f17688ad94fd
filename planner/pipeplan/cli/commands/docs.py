"""`pipeplan docs [PAGE]`: the documentation that is installed with the package."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from pipeplan.cli.options import quiet_option
from pipeplan.cli.output import note, print_line
from pipeplan.errors import InputError
from pipeplan.util.files import bundled_folder, read_text
from pipeplan.util.text import did_you_mean


def _pages() -> dict[str, Path]:
    """The pages by name, such as `sweep` and `reference/cli`; general pages come first."""
    folder = bundled_folder("docs")
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.md")}
    return dict(sorted(found.items(), key=lambda item: ("/" in item[0], item[0])))


def _shown(text: str) -> str:
    """A page without the comments before its title, which only editors of the page need."""
    return text.partition("-->")[2].lstrip() if text.startswith("<!--") else text


def _complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in _pages() if name.startswith(incomplete)]


@click.command("docs")
@click.argument("page", required=False, shell_complete=_complete)
@quiet_option
def command(page: str | None) -> None:
    """Print PAGE of the documentation, which is installed with pipeplan; without PAGE list all pages.

    \b
    pipeplan docs
    pipeplan docs tutorial
    pipeplan docs servers
    """
    pages = _pages()
    if page is None:
        titles = {name: _shown(read_text(path)).partition("\n")[0].lstrip("# ") for name, path in pages.items()}
        width = max(map(len, pages), default=0)
        for name, title in titles.items():
            print_line(f"{name:{width}}  {title}")
        note(f"in {bundled_folder('docs')}; pipeplan docs PAGE prints one", dim=True)
        return
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        raise InputError(f"there is no page {page!r}; {did_you_mean(name, pages)}")
    print_line(_shown(read_text(pages[name])), newline=False)
