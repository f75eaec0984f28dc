"""The settings of a store: what `memstore.json` holds."""

from __future__ import annotations

import uuid
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from memstore.engine.root.filesystem import Durability
from memstore.errors import FormatVersionError, NotAStoreError
from memstore.undecodable import UNDECODABLE

Feature = Literal["sharded", "mutable", "cluster", "shared"]

FORMAT = 2  # the newest that can be read; a store has the oldest one that can say what it holds
_PLAIN, _WITH_FEATURES = 1, 2
SHARDED: Feature = "sharded"  # records of several segments, and prepared segments
MUTABLE: Feature = "mutable"  # entries whose rows are written in place
CLUSTER: Feature = "cluster"  # the store was served to other hosts: records name what lies there
SHARED: Feature = "shared"  # its segments lie on storage that hosts mount, its catalogs do not: see `shared.py`

GRACE = 60.0  # seconds
INLINE_LIMIT = 1 << 16  # bytes; up to here a put into the record takes a fraction of one into a segment


class _AnyFormat(msgspec.Struct):
    """What every version of `memstore.json` has."""

    format: int


class _AnyFeatures(msgspec.Struct):
    features: tuple[str, ...] = ()


class Shared(msgspec.Struct, frozen=True):
    """What a store on storage that hosts share has fixed, beside all else.

    Attributes:
        store: the id that all of its hosts have in common; each has one of its own, too.
        grace: seconds for which the file of a value that was replaced stays, for its readers on other hosts.
        maps: files may be mapped: the storage keeps what a host has open, also when another one has removed it.
    """

    store: str
    grace: Annotated[float, Meta(ge=0, le=1e6)] = GRACE
    maps: bool = False


class Settings(msgspec.Struct, frozen=True):
    """What `memstore.json` holds. All is fixed at creation, but that `features` come when they are first used."""

    format: Annotated[int, Meta(ge=1, le=FORMAT)]
    store: str
    durability: Durability
    checksum: bool
    inline_limit: Annotated[int, Meta(ge=0, le=1 << 16)]  # bytes
    file_mode: Annotated[int, Meta(ge=0, le=0o777)]
    unix_group: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None
    features: tuple[Feature, ...] = ()
    shared: Shared | None = None  # with the feature of that name

    def with_feature(self, feature: Feature) -> Settings:
        """A version of memstore that doesn't know the feature refuses the store from here on."""
        return msgspec.structs.replace(self, format=_WITH_FEATURES, features=(*self.features, feature))

    @property
    def durable(self) -> bool:
        return self.durability == "disk"

    @property
    def folder_mode(self) -> int:
        """The file mode, with the x bits that match its r bits."""
        return self.file_mode | (self.file_mode & 0o444) >> 2


def new_settings(
    *, durability: Durability | None, checksum: bool | None, inline_limit: int | None, file_mode: int, group: int | None
) -> Settings:
    chosen = durability or "process"
    settings = Settings(
        format=_PLAIN,
        store=uuid.uuid4().hex,
        durability=chosen,
        checksum=chosen == "disk" if checksum is None else checksum,
        inline_limit=INLINE_LIMIT if inline_limit is None else inline_limit,
        file_mode=file_mode,
        unix_group=group,
    )
    try:  # what was written could else not be read again
        return msgspec.convert(msgspec.to_builtins(settings), Settings)
    except msgspec.ValidationError as error:
        raise ValueError(f"no store can be created so: {error}") from None


def encode_settings(settings: Settings) -> bytes:
    written = msgspec.to_builtins(settings)
    if not settings.features:  # as before there were any
        del written["features"]
    if settings.shared is None:
        del written["shared"]
    return msgspec.json.format(msgspec.json.encode(written)) + b"\n"


def decode_settings(text: bytes, path: str) -> Settings:
    """Raises FormatVersionError, and NotAStoreError; `path` is where the text was found."""
    try:
        version = msgspec.json.decode(text, type=_AnyFormat).format
        if version > FORMAT:
            raise FormatVersionError(
                f"{path} has format {version}, and this version of memstore reads up to {FORMAT}: upgrade memstore"
            )
        unknown = sorted(set(msgspec.json.decode(text, type=_AnyFeatures).features) - set(get_args(Feature)))
        if unknown:
            raise FormatVersionError(
                f"{path} has the feature {', '.join(unknown)}, which this version of memstore doesn't know: upgrade it"
            )
        settings = msgspec.json.decode(text, type=Settings)
        if (settings.shared is None) == (SHARED in settings.features):
            raise NotAStoreError(f"{path} is damaged: the feature {SHARED!r}, and what it says of it, go together")
        return settings
    except UNDECODABLE as error:
        raise NotAStoreError(
            f"{path} is foreign or damaged: {error}: put back what was there, or choose another folder"
        ) from None
