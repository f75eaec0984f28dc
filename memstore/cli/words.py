"""Errors in the words of the command line: where the library says what to pass to a method, it says which option."""

from __future__ import annotations

import re

_SNAPSHOT = r"(?: \(a snapshot with [^)]*\))?"

# What the library says -> what the command line says. Each is tried, in this order.
_WORDS: tuple[tuple[str, str], ...] = (
    (rf"open the store with allow_pickle=True{_SNAPSHOT}", "say --allow-pickle"),
    (r"which only allow_pickle=True can store", "which only --allow-pickle can store"),
    (r"with attach\(copy=True\)", "with `memstore attach --copy`"),
    (r"attach it with copy=True", "attach it with --copy"),
    (r"say format= ", "say --format "),
    (r"leave source_as= out", "leave --from out"),
    (r"say target_as='([\w-]+)'", r"say --to \1"),
    (r"say target_as= \(of ", "say --to FORMAT ("),
    (r"export as '(\w+)'", r"say --format \1"),
    (
        r"max_shard_size is for format='safetensors', and not for '(\w+)'",
        r"--max-shard-size is for --format safetensors",
    ),
    (r"run memstore\.repair\b", "run `memstore repair`"),
    (r": open it with mode 'r'$", ": this command writes to the store"),
    (r"open the store with mode 'r\+' once", "`memstore gc` it once as a user who may write"),
    (
        r"(is a dataset, .*?): use store\.open_dataset.*frees the key",
        r"\1: `memstore get` shows it, `memstore rm` frees the key",
    ),
    (
        r"(is a replay buffer, .*?): use memstore\.Rep.*frees the key",
        r"\1: `memstore get` shows it, `memstore rm` frees the key",
    ),
    (
        r"memstore\.Snapshot reads it, store\.attach serves it",
        "`memstore snapshot` looks into it, `memstore attach` serves it",
    ),
    (r"until the timeout: open the store with mode 'r\+', which .*$", "until the timeout: try it again"),
    (r"; wait\(.*\) waits for its first put$", ""),
    (r"\bkeys\(\) (lists|names) ", r"`memstore ls` \1 "),
    (r"(is a key, and .* a part of its value): get\(.*$", r"\1: say KEY and LEAF apart"),
    (r"abort\(.*\) gives it up", "`memstore abort` gives it up"),
    (r"there is nothing to attach", "there is no such file or folder"),
    (r"missing_ok=True leaves out", "--missing-ok leaves out"),
    (r"^\[Errno -?\d+\] (.+): '(.+)'$", r"\2: \1"),
)
_COMPILED = tuple((re.compile(pattern), words) for pattern, words in _WORDS)


def in_words(text: str) -> str:
    """The same message, with options in the place of arguments."""
    for pattern, words in _COMPILED:
        text = pattern.sub(words, text)
    return text
