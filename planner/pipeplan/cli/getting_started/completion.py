"""`pipeplan completion SHELL`: print the completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from pipeplan.cli.shared.output import print_line

PROGRAM, VARIABLE = "pipeplan", "_PIPEPLAN_COMPLETE"
INSTALL = {
    "bash": (
        'For this shell:      eval "$(pipeplan completion bash)"',
        "For all new shells:  pipeplan completion bash > ~/.local/share/bash-completion/completions/pipeplan",
        "(make that folder first; without the package bash-completion, add the first line to ~/.bashrc instead)",
    ),
    "zsh": (
        'For this shell:      eval "$(pipeplan completion zsh)"',
        "For all new shells:  add that line to ~/.zshrc, below compinit",
    ),
    "fish": (
        "For this shell:      pipeplan completion fish | source",
        "For all new shells:  pipeplan completion fish > ~/.config/fish/completions/pipeplan.fish",
    ),
}


@click.command("completion")
@click.argument("shell", type=click.Choice(list(INSTALL)))
def command(shell: str) -> None:
    """Print the script with which SHELL completes commands, options, models, clusters, profiles and files.

    \b
    pipeplan completion bash
    pipeplan completion zsh
    pipeplan completion fish
    """
    complete = get_completion_class(shell)
    assert complete is not None
    root = click.get_current_context().find_root().command
    source = complete(root, {}, PROGRAM, VARIABLE).source()
    # Zsh recognises a completion file by its first line, so the comments go below it.
    head, _, rest = source.lstrip("\n").partition("\n")
    first, remaining = ([head], rest) if head.startswith("#compdef") else ([], f"{head}\n{rest}")
    print_line("\n".join([*first, *(f"# {line}" for line in INSTALL[shell]), remaining.rstrip()]))
