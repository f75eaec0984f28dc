"""Error messages in the words of the command line.

message_of, in_words     the library's messages, with options in the place of a method's arguments
message_without_store    what is said of a ROOT where there is no store: what is there, which stores are near, and
                         what to do
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from memstore.engine import has_settings
from memstore.errors import CorruptionError, KeyNotFoundError
from memstore.listing import GLOB, near

# --- The library's messages ------------------------------------------------------------------------------------------


_SNAPSHOT = r"(?: \(a snapshot with [^)]*\))?"

# What the library says -> what the command line says. Each is tried, in this order.
WORDS: tuple[tuple[str, str], ...] = (
    (rf"open the store with allow_pickle=True{_SNAPSHOT}", "say --allow-pickle"),
    (r"which only allow_pickle=True can store", "which only --allow-pickle can store"),
    (r"convert it with allow_pickle=True", "say --allow-pickle"),
    (r"as a pickle; allow_pickle=True writes it", "as a pickle; --allow-pickle writes it"),
    (r"with attach\(copy=True\)", "with `memstore attach --copy`"),
    (r"attach it with copy=True", "attach it with --copy"),
    (r"say format= ", "say --format "),
    (r"say source_as= \(of ", "say --from ("),
    (r"leave format= out", "leave --format out"),
    (r"leave source_as= out", "leave --from out"),
    (r"leave target_as= out", "leave --to out"),
    (r"say target_as='([\w-]+)'", r"say --to \1"),
    (r"say target_as= \(of ", "say --to FORMAT ("),
    (r"export as 'torch'", "write a .pt file"),
    (r": format='torch' keeps it as it is$", ": a .pt file keeps it as it is"),
    (r"and max_expanded is (.+?): allow more", r"and --max-expanded is \1: allow more"),
    (r": give the value a name$", ": say one"),
    (r"^root is (the path of a folder|a folder of)", r"ROOT is \1"),
    (r"\(--address; of memstore\.join MEMSTORE_ADDRESS\)", "(--address)"),
    (
        r"max_shard_size is for format='safetensors', and not for '(\w+)'",
        r"--max-shard-size is for --format safetensors",
    ),
    (r"memstore\.open opens it$", "`memstore ls` lists its keys"),
    (r"get a key of it, and put that$", "`memstore cp` copies its keys"),
    (r"run memstore\.repair\b", "run `memstore repair`"),
    (
        r'"~" is taken as a name: os\.path\.expanduser makes your home folder of it',
        'a shell takes "~" as your home folder only outside of quotes',
    ),
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
    (r"open the store with mode 'r\+', which .*$", "try it again"),
    (r"; wait\(.*\) waits for its first put$", ""),
    (r"\bkeys\(\) (lists|names) ", r"`memstore ls` \1 "),
    (r"\bkeys\((.+)\) lists (the|those) ", r"`memstore ls ROOT \1` lists \2 "),
    (r"(is a key, and .* a part of its value): get\(.*$", r"\1: say KEY and LEAF apart"),
    (r"abort\(.*\) gives it up", "`memstore abort` gives it up"),
    (r"there is nothing to attach", "there is no such file or folder"),
    (r"missing_ok=True leaves out", "--missing-ok leaves out"),
    (
        r"open the store once with a larger capacity=, which all processes then have",
        "no command sets the capacity: a program that opens the store with a larger one sets it for all",
    ),
    (
        r"\. put_many and delete_many take keys host by host with atomic=False; get such keys one by one",
        ": run the command once for each such text",
    ),
    (r"serve it with transport='tcp', or with 'auto', which takes what there is", "say --transport tcp, or auto"),
    (r"or one with durability='disk'", "or a store on a disk, made with the durability 'disk'"),
    (r"create it with file_mode=(0o\d+)", r"whoever creates it must do so with the file mode \1"),
    (r"; pass device='cpu'(, or import what registers it)?", ": run this where it is"),
    (
        r"load it with numpy\.load\(path, allow_pickle=True\), and put the array .*$",
        "load it in a program, and put the array from there",
    ),
    (r"load it with numpy\.load, and put the array.*$", "load it in a program, and put the array from there"),
    (r"load it with numpy\.load$", "load it in a program"),
    (r"load it with torch\.jit\.load, and put its state_dict\(\)", "load it in a program, and put its state dict"),
    (
        r"put dict\(numpy\.load\(path\)\), or attach the \.npy of each by itself",
        "unpack it, and use its .npy files one by one",
    ),
    (r"numpy\.save\(path, store\.get\(key\)\)", "`memstore get ROOT KEY LEAF -o FILE`"),
    (r"numpy\.savez\(path, \*\*store\.get\(key\)\)", "a program that uses NumPy"),
    (r"\bformat='(\w+)'", r"--format \1"),
    (r"^\[Errno -?\d+\] (.+): '(.+?)'(?: -> .+)?$", r"\2: \1"),
    (r"^\[Errno -?\d+\] (.+)$", r"\1"),
)

# What torch, numpy and Python say, as it stands in the library's messages.
_OTHERS = (
    (r"^tensor: (it is of torch\.\w+, which)", r"\1"),
    (r"\btorch\.((?:b?float|q?u?int|complex|bool)\w*)", r"\1"),
    (
        r"'utf-8' codec can't decode bytes? ([\w-]+) in position ([\d-]+): (?:invalid \w+ byte|unexpected end of data)",
        r"no text, for \1 at byte \2",
    ),
    (r"the magic string is not correct; expected .*, got b(['\"]).*?\1", "it doesn't begin as a .npy file does"),
)
_PART_IN_TEXT = re.compile(r"\['([^']*)'\]|\[(\d+)\]")
_LEAF_IN_TEXT = re.compile(
    rf"\bvalue((?:{_PART_IN_TEXT.pattern.replace('(', '(?:')})+)"
)  # value['layer'][0], which is LEAF "layer/0"
_COMPILED = tuple((re.compile(pattern), words) for pattern, words in (*WORDS, *_OTHERS))


def message_of(error: BaseException) -> str:
    """Returns an error's message, in words; of a damaged catalog with what mends it."""
    text = in_words(str(error))
    if isinstance(error, KeyNotFoundError) and GLOB.intersection(error.key or ""):
        return f"{text}. A KEY is plain text, and not a pattern"
    is_of_catalog = isinstance(error, CorruptionError) and (error.path or "").endswith("/data.mdb")
    return f"{text}: run `memstore repair`" if is_of_catalog and "`memstore repair`" not in text else text


def in_words(text: str) -> str:
    """Returns the same message, with options in the place of arguments."""
    for pattern, words in _COMPILED:
        text = pattern.sub(words, text)
    return _LEAF_IN_TEXT.sub(
        lambda match: repr("/".join(two[0] or two[1] for two in _PART_IN_TEXT.findall(match[1]))), text
    )


# --- No store there --------------------------------------------------------------------------------------------------


_NO_STORE = tuple(  # the library's messages: up to what they advise
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"(?P<path>.+): the parent folder .+ doesn't exist: .+",
        r"(?P<path>.+) doesn't exist: .+",
        r"(?P<path>.+) is no store: it has (no memstore\.json|neither memstore\.json nor segments)\b.*",
    )
)
PUT_BACK = "put it back, or write it as docs/format.md has it, and run `memstore repair`"
_LOOKED_AT = 1000  # names of a folder
_NAMED = 3

# What makes a store that a command could then look into. The others are for stores that have been used.
_MAKERS = {
    **dict.fromkeys(("ls", "watch", "top", "stats"), "`memstore put`, or a program that opens it, makes one"),
    "status": "`memstore serve` makes one, and serves it",
    "put": "only a store has a version to expect: check the path",
}
_TWO_STORES = ("cp", "diff")  # of which the second is no mistake
_MAKES_STORE = ("put", "attach", "cp", "serve")  # a store, though not the folder that it is to be in


def message_without_store(text: str, command: str | None, words: Sequence[str] = ()) -> str | None:
    """Returns the message in the place of the library's, which advises to make a store; None if it says something else.

    Args:
        text: the library's message.
        command: that which was called.
        words: what the command line has after the command.
    """
    found = next(filter(None, (pattern.fullmatch(text) for pattern in _NO_STORE)), None)
    if found is None:
        return None
    path = found["path"]
    if has_lost_settings(path):
        return f"{path}/memstore.json is missing, though the folder has the rest of a store: {PUT_BACK}"
    above = _store_above(path)
    if above:
        rest = path[len(above) :].lstrip("/")
        key = "" if os.path.lexists(path) else f", and {rest!r} as the KEY"
        return f"there is no store at {path}: it lies within the store {above}: say that as ROOT{key}"
    missing = _first_missing(path)
    stores = _stores_near(path, missing)
    if stores:
        advice = f"did you mean {' or '.join(stores)}?"
    else:
        advice = _of_swapped(path, command, words) or _advice(path, missing, command)
    return f"there is no store at {path}: {_what(path, missing)}; {advice}"


def has_lost_settings(path: str) -> bool:
    """Returns whether a folder has all of a store but its memstore.json."""
    return not has_settings(path) and all(os.path.isdir(f"{path}/{name}") for name in ("catalog", "segments"))


def _store_above(path: str) -> str:
    """Returns the nearest folder above the path that is a store, or empty."""
    above = os.path.dirname(path)
    while above != os.path.dirname(above) and not has_settings(above):
        above = os.path.dirname(above)
    return above if has_settings(above) else ""


def _first_missing(path: str) -> str:
    """Returns the uppermost folder of a path that isn't there; empty if all are."""
    missing = ""
    while path and not os.path.lexists(path):
        missing, path = path, os.path.dirname(path)
    return missing


def _what(path: str, missing: str) -> str:
    if missing:
        return "the folder doesn't exist" if missing == path else f"the folder {missing} doesn't exist"
    names = list(_names(path))
    some = ", ".join(map(repr, sorted(names)[:_NAMED])) + (", ..." if len(names) > _NAMED else "")
    return f"the folder has {some}, and no memstore.json" if names else "the folder is empty"


def _of_swapped(path: str, command: str | None, words: Sequence[str]) -> str:
    """Returns what is said of arguments in another order, where the store isn't the first; empty if there is none."""
    if command in _TWO_STORES or not words or os.path.abspath(words[0]) != path:
        return ""
    others = (word for word in words[1:] if has_settings(word))
    return next((f"{word!r} is a store: say it first, as ROOT" for word in others), "")


def _advice(path: str, missing: str, command: str | None) -> str:
    if os.path.basename(missing).startswith("~"):
        return 'a shell takes "~" as your home folder only outside of quotes'
    if missing not in ("", path):  # nothing can be made there either
        is_maker = command in _MAKES_STORE
        return f"check the path{f', or create {os.path.dirname(path)} first' if is_maker else ''}"
    if command is None:
        return "check the path"
    return _MAKERS.get(command, f"`memstore {command}` needs one: check the path")


def _stores_near(path: str, missing: str) -> list[str]:
    """Returns stores in the folder; or where the path leads under a name like that of the missing folder."""
    inside = [f"{path}/{name}" for name in sorted(_names(path)) if has_settings(f"{path}/{name}")]
    if inside:
        return inside[:_NAMED]
    wrong = missing or path
    parent, own = os.path.split(wrong)
    others = (os.path.join(parent, name) + path[len(wrong) :] for name in near(own, set(_names(parent)) - {own}))
    return [other for other in others if has_settings(other)]


def _names(folder: str) -> Iterator[str]:
    """Yields the first names in a folder; none, if it can't be read."""
    try:
        with os.scandir(folder) as found:
            for entry, _ in zip(found, range(_LOOKED_AT), strict=False):
                yield entry.name
    except OSError:
        return
