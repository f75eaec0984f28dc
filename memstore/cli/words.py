"""Errors in the words of the command line: where the library says what to pass to a method, it says which option."""

from __future__ import annotations

import re

from memstore.errors import CorruptionError, KeyNotFoundError
from memstore.listing import GLOB

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
    (r"\(memstore\.join, (memstore serve --join)\)", r"(`\1`)"),
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
    (r"until the timeout: open the store with mode 'r\+', which .*$", "until the timeout: try it again"),
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
        r"\. put_many and delete_many take keys home by home with atomic=False; get such keys one by one",
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
_PART = re.compile(r"\['([^']*)'\]|\[(\d+)\]")
_LEAF = re.compile(rf"\bvalue((?:{_PART.pattern.replace('(', '(?:')})+)")  # value['layer'][0], which is LEAF "layer/0"
_COMPILED = tuple((re.compile(pattern), words) for pattern, words in (*WORDS, *_OTHERS))


def told(error: BaseException) -> str:
    """An error's message, in words; of a damaged catalog with what mends it."""
    text = in_words(str(error))
    if isinstance(error, KeyNotFoundError) and GLOB.intersection(error.key or ""):
        return f"{text}. A KEY is plain text, and not a pattern"
    is_of_catalog = isinstance(error, CorruptionError) and (error.path or "").endswith("/data.mdb")
    return f"{text}: run `memstore repair`" if is_of_catalog and "`memstore repair`" not in text else text


def in_words(text: str) -> str:
    """The same message, with options in the place of arguments."""
    for pattern, words in _COMPILED:
        text = pattern.sub(words, text)
    return _LEAF.sub(lambda match: repr("/".join(two[0] or two[1] for two in _PART.findall(match[1]))), text)
