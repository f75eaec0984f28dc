"""Buckets of object stores: URLs, options, requests, and what services refuse, as memstore's errors. Imports no torch.

    s3://BUCKET/PATH            Amazon S3, and what speaks its language (MinIO, R2, Ceph, ...)
    gs://, gcs://BUCKET/PATH    Google Cloud Storage
    az://CONTAINER/PATH         Azure Blob Storage
    memory://NAME/PATH          the memory of this process, for tests

A `Bucket` has the few requests that snapshots make: one object put whole, in one request, or only if there is none; a
range of one fetched; one copied by the service; names listed; objects removed. Each request has a time limit, and is
repeated with backoff while the service fails. obstore is imported when the first bucket is opened: it comes with the
extra `cloud`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import socket
import threading
from collections.abc import Generator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from memstore._threads import between_forks
from memstore._wording import first_line, is_flattened
from memstore.errors import (
    AlreadyExistsError,
    CredentialsError,
    KeyNotFoundError,
    MemstoreError,
    MissingPackageError,
    NoBucketError,
    PermissionDeniedError,
    StorageError,
    ThrottledError,
    UnsupportedFilesystemError,
    UnsupportedValueError,
)

# --- URLs ------------------------------------------------------------------------------------------------------------


_SCHEMES = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "memory": "memory"}
_LOCAL = ("file", "fs")
_KNOWN = "s3://, gs:// (or gcs://), az://, memory:// and file://"


class BucketUrl(NamedTuple):
    """A place in a bucket.

    Attributes:
        scheme: "s3", "gs", "az" or "memory".
        bucket: its name; of az:// the container's, of memory:// any.
        key: what stands before the names of the objects, without a "/" at either end.
    """

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"


def is_url(path: Any) -> bool:
    """Returns whether this is the URL of a place in a bucket, as `path_or_url` returns it."""
    return isinstance(path, str) and path.partition("://")[0] in _SCHEMES and "://" in path


def path_or_url(path: Any) -> str:
    """Returns the absolute path of a folder, or a URL of a bucket as all of memstore writes it.

    Raises:
        TypeError: it is no text and no path.
        ValueError: a URL of another kind, or one without a bucket or without a path in it.
    """
    found = os.fspath(path) if isinstance(path, os.PathLike) else path  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(found, str) or not found or "\0" in found:
        raise TypeError(f"path is that of a folder, or a URL, as text, and not {path!r:.100}")
    if "://" not in found:
        if isinstance(path, os.PathLike) and is_flattened(found):
            raise ValueError(f"{found!r} was a URL, of which pathlib.Path removes a slash: give it as text")
        return os.path.abspath(found)
    scheme = found.partition("://")[0].lower()
    if scheme in _LOCAL:
        return os.path.abspath(found.partition("://")[2].removeprefix("localhost"))
    return str(parse_url(found))


def parse_url(url: str) -> BucketUrl:
    """Returns the parts of a URL of a bucket. Raises ValueError for what is none."""
    scheme, _, rest = url.partition("://")
    known = _SCHEMES.get(scheme.lower())
    if known is None:
        raise ValueError(f"{url!r:.200}: there is no storage {scheme!r:.40}; snapshots lie in folders, or at {_KNOWN}")
    bucket, _, key = rest.partition("/")
    key = key.strip("/")
    if not bucket or not key:
        raise ValueError(f"{url!r:.200} lacks {'a path in' if bucket else 'the name of'} the bucket: "
                         f"{known}://BUCKET/PATH")  # fmt: skip
    if any(part in ("", ".", "..") for part in key.split("/")) or re.search(r"[?#\0-\x1f\x7f]", rest):
        raise ValueError(f"{url!r:.200}: a path in a bucket has no '?', '#', '.', '..', '//' and no control characters")
    return BucketUrl(known, bucket, key)


# --- Options ---------------------------------------------------------------------------------------------------------


_OWN = ("request_timeout", "retry_timeout", "client_options", "credential_provider", "conditional_put")
_REQUEST_TIMEOUT = 120.0  # seconds for one request: an object of 64 MiB at 0.6 MB/s
_RETRY_TIMEOUT = 180.0  # seconds from a request's first failure: signatures are valid for five minutes
_CONNECT_TIMEOUT = 10.0  # seconds
_MOST_RETRIES = 12
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 15.0  # seconds of the backoff
_PROBE = 1.0  # seconds for the service that gives a machine in a cloud its credentials
_SECONDS = 3600.0  # the most that a request may take, or be repeated for


OF_ALL = ("allow_pickle", "timeout")  # storage_options that folders have, too


def bucket_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns those `storage_options` that are for a bucket."""
    return {key: value for key, value in (given or {}).items() if key not in OF_ALL}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError for options that no bucket takes. obstore knows the names of the others."""
    for name in ("request_timeout", "retry_timeout"):
        value = options.get(name)
        if value is not None and not (
            isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _SECONDS
        ):
            raise ValueError(f"storage_options[{name!r}] is a number of seconds up to {_SECONDS:g}, and not {value!r}")


class BucketObject(NamedTuple):
    """An object that is there.

    Attributes:
        size: in bytes.
        modified: when it was put, by the service's clock.
        tag: of this version of it, for a put in its place.
    """

    size: int
    modified: datetime
    tag: dict[str, str]


# --- Buckets ---------------------------------------------------------------------------------------------------------


VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")  # how the names of those begin that say where buckets are, and whose
_buckets: dict[tuple[Any, ...], Bucket] = {}
_memories: dict[str, Any] = {}
_lock = threading.Lock()
_used_by: int | None = None  # the process in which obstore's threads run


def variables() -> dict[str, str]:
    """Returns the variables of the environment that say where buckets are, and with which credentials."""
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}


def open_bucket(url: BucketUrl, options: Mapping[str, Any] | None = None) -> Bucket:
    """Returns the bucket of a URL: the same one for the same options, since it keeps its connections.

    Raises:
        MissingPackageError: obstore isn't installed.
        CredentialsError: there are none, as far as it can be told without a request.
        TypeError: an option that the service doesn't have.
    """
    given = dict(options or {})
    check_options(given)
    said = variables().items()  # credentials are renewed
    given_key = repr(sorted(given.items(), key=lambda item: item[0]))
    key = (url.scheme, url.bucket, os.getpid(), given_key, hash(tuple(sorted(said))))
    with _lock:
        if key not in _buckets:
            _buckets[key] = Bucket(url, given)
        return _buckets[key]


class Bucket:
    """A bucket, and the requests that snapshots make. Thread-safe. Use `open_bucket`.

    All raise, with the URL in their texts: NoBucketError, CredentialsError, PermissionDeniedError, ThrottledError,
    StorageError.

    Attributes:
        is_here: it is memory of this process.
    """

    def __init__(self, url: BucketUrl, options: dict[str, Any]) -> None:
        global _used_by
        self._url = url
        self.is_here = url.scheme == "memory"
        self._obstore = _import_obstore(str(url))
        if _used_by not in (None, os.getpid()) and not self.is_here:
            raise MemstoreError(
                f"{url}: this process was forked by process {_used_by}, which has used an object store; its library's "
                'threads are not here: start processes with "spawn" or "forkserver", or use no URL before the fork'
            )
        with self._errors(""):
            self._store: Any = self._open(options)
        if not self.is_here:
            _used_by = os.getpid()

    def _open(self, given: dict[str, Any]) -> Any:
        with between_forks():
            import obstore.store as stores
        scheme, bucket = self._url.scheme, self._url.bucket
        if self.is_here:
            return _memories.setdefault(bucket, stores.MemoryStore())
        own = {name: given.pop(name) for name in _OWN if name in given}
        request = float(own.get("request_timeout") or _REQUEST_TIMEOUT)
        client: dict[str, Any] = {
            "timeout": timedelta(seconds=request),
            "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT, request)),
            **(own.get("client_options") or {}),
        }
        endpoint = _endpoint(scheme, given)
        if endpoint.startswith("http://"):
            client.setdefault("allow_http", True)  # said by whoever wrote the address
        retry = {
            "max_retries": _MOST_RETRIES,
            "retry_timeout": timedelta(seconds=float(own.get("retry_timeout") or _RETRY_TIMEOUT)),
            "backoff": {
                "init_backoff": timedelta(seconds=_FIRST_PAUSE),
                "max_backoff": timedelta(seconds=_LAST_PAUSE),
                "base": 2,
            },
        }
        says_it = any(key.lower().endswith("unsigned_payload") for key in given)
        if scheme == "s3" and not endpoint.startswith("http://") and not says_it:
            given["unsigned_payload"] = True  # TLS protects them; SHA-256 costs a core per 300 MB/s
        if scheme == "s3" and own.get("conditional_put") is not None:
            given["conditional_put"] = own["conditional_put"]
        common: dict[str, Any] = {"client_options": client, "retry_config": retry}
        provider = own.get("credential_provider")
        if scheme == "s3":
            provider = provider or _credentials_of_boto3(self._url, given)
        if provider is not None:
            common["credential_provider"] = provider
        kind: Any = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[scheme]
        try:
            return kind(bucket, config=given, **common)
        except self._obstore.exceptions.UnknownConfigurationKeyError as error:
            raise TypeError(f"storage_options: {first_line(error)}") from None

    # --- requests

    def put(self, name: str, data: Any) -> None:
        """Puts an object, whatever is there.

        Args:
            data: a buffer, or a list of buffers. It is sent from where it lies, and must not change meanwhile.
        """
        if self.is_here:  # which keeps what it is given
            data = [bytes(one) for one in data] if isinstance(data, list) else bytes(data)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        with self._errors(name):
            self._obstore.put(self._store, name, data, use_multipart=False, mode="overwrite")

    def create(self, name: str, data: bytes) -> None:
        """Puts an object, if there is none of this name.

        Raises:
            AlreadyExistsError: there is one. (It may be this one, if an answer was lost on its way.)
            UnsupportedFilesystemError: the service has no conditional writes. Nothing was put.
        """
        with self._errors(name):
            self._obstore.put(self._store, name, data, use_multipart=False, mode="create")

    def replace(self, name: str, data: bytes, before: BucketObject) -> None:
        """Puts an object in the place of another one.

        Raises:
            AlreadyExistsError: what is there is not (any more) what it was.
            UnsupportedFilesystemError: as of `create`.
        """
        with self._errors(name):
            self._obstore.put(self._store, name, data, use_multipart=False, mode=before.tag)

    def fetch(self, name: str, start: int, stop: int) -> memoryview:
        """Returns some bytes of an object: fewer if it ends before. Raises KeyNotFoundError if there is none."""
        with self._errors(name):
            try:
                return memoryview(self._obstore.get_range(self._store, name, start=start, end=stop))
            except self._obstore.exceptions.BaseError as error:
                if _OUT_OF_RANGE.search(str(error)):
                    return memoryview(b"")
                raise

    def fetch_all(self, name: str, limit: int) -> tuple[bytes, BucketObject]:
        """Returns a small object. Raises KeyNotFoundError; StorageError if it has more than `limit` bytes."""
        with self._errors(name):
            found = self._obstore.get(self._store, name)
            about = _object_of(found.meta)
            if about.size > limit:
                raise StorageError(
                    f"{self._place(name)} has {about.size:,} bytes, and {limit:,} are the most", path=self._place(name)
                )
            return bytes(found.bytes()), about

    def copy(self, name: str, target: str) -> None:
        """Has the service copy an object, whatever is there. Raises KeyNotFoundError if there is none."""
        with self._errors(name):
            self._obstore.copy(self._store, name, target, overwrite=True)

    def look(self, name: str) -> BucketObject | None:
        """Returns what is known of an object; None if there is none."""
        try:
            with self._errors(name):
                return _object_of(self._obstore.head(self._store, name))
        except KeyNotFoundError:
            return None

    def list(self, prefix: str) -> dict[str, BucketObject]:
        """Returns the objects "PREFIX/NAME" by name; those with a further "/" are left out."""
        with self._errors(prefix):
            found = self._obstore.list_with_delimiter(self._store, prefix)
        return {one["path"][len(prefix) + 1 :]: _object_of(one) for one in found["objects"]}

    def list_all(self, prefix: str) -> dict[str, BucketObject]:
        """Returns the objects "PREFIX/NAME" by name, those with a further "/" in it too."""
        with self._errors(prefix):
            found = [one for some in self._obstore.list(self._store, prefix) for one in some]
        return {one["path"][len(prefix) + 1 :]: _object_of(one) for one in found}

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects; one that isn't there is as one that was removed."""
        with self._errors(names[0] if names else ""), contextlib.suppress(FileNotFoundError):
            if self.is_here:
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        self._obstore.delete(self._store, [name])
            elif names:
                self._obstore.delete(self._store, list(names))

    # --- errors

    def _place(self, name: str) -> str:
        return f"{self._url.scheme}://{self._url.bucket}/{name}" if name else str(self._url)

    @contextlib.contextmanager
    def _errors(self, name: str) -> Generator[None]:
        """Turns obstore's errors into memstore's, which name the URL, what was answered, and what to do."""
        try:
            yield
        except (MemstoreError, TypeError, ValueError):
            raise
        except (self._obstore.exceptions.BaseError, OSError, NotImplementedError) as error:
            raise error_of(self._url, self._place(name), error) from error


def _object_of(meta: Any) -> BucketObject:
    tag = {key: meta[key] for key in ("e_tag", "version") if meta.get(key) is not None}
    return BucketObject(meta["size"], meta["last_modified"], tag)


def _import_obstore(url: str) -> Any:
    try:
        with between_forks():
            import obstore
    except ImportError:
        raise MissingPackageError(
            f"{url}: object stores need the package obstore: pip install 'memstore-torch[cloud]'"
        ) from None
    return obstore


def _endpoint(scheme: str, given: Mapping[str, Any]) -> str:
    """Returns the address that was given for the service, in options or the environment; "" for its own."""
    names = {
        "s3": ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url"),
        "gs": ("base_url", "google_base_url", "google_service_account_base_url"),
        "az": ("endpoint", "azure_storage_endpoint", "azure_endpoint"),
    }[scheme]
    for key, value in given.items():
        if key.lower() in names:
            return str(value).lower()
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") if scheme == "s3" else ():
        if os.environ.get(name):
            return os.environ[name].lower()
    return ""


def _credentials_of_boto3(url: BucketUrl, given: Mapping[str, Any]) -> Any:
    """Returns a provider of the credentials in ~/.aws, by boto3; None if there are others, or obstore finds them.

    Raises CredentialsError where there are surely none: obstore would look for a cloud around this machine for minutes.
    """
    names = {key.lower().removeprefix("aws_") for key in given}
    if names & {"access_key_id", "skip_signature", "web_identity_token_file", "role_arn", "metadata_endpoint"}:
        return None
    by_variables = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
                    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE", "AWS_METADATA_ENDPOINT")  # fmt: skip
    if any(os.environ.get(name) for name in by_variables):
        return None
    files = (os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
             os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"))  # fmt: skip
    has_files = any(os.path.exists(os.path.expanduser(file)) for file in files)
    if has_files:
        with contextlib.suppress(Exception):  # of boto3, which isn't ours: then they are looked for elsewhere
            with between_forks():
                boto3: Any = importlib.import_module("boto3")
                from obstore.auth.boto3 import Boto3CredentialProvider
            session = boto3.Session()
            if session.get_credentials() is not None:
                return Boto3CredentialProvider(session)
    try:
        socket.create_connection(("169.254.169.254", 80), timeout=_PROBE).close()
    except OSError:
        also = "; those of ~/.aws are read if boto3 is installed" if has_files else ""
        raise CredentialsError(
            f"{url}: no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give "
            'storage_options={"access_key_id": ..., "secret_access_key": ...}; {"skip_signature": True} reads a '
            f"public bucket{also}"
        ) from None
    return None


# --- What services refuse --------------------------------------------------------------------------------------------


_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9_.-]{1,80})</Code>|\"code\": *\"([A-Za-z]+)\"")
_TOLD = re.compile(r"<Message>([^<\n]{1,300})")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName", "AllAccessDisabled", "PermanentRedirect"}
_WRONG_CLOCK = {"RequestTimeTooSkewed", "RequestExpired"}
_WRONG_CREDENTIALS = {
    *("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId"),
    *("SignatureDoesNotMatch", "AuthenticationFailed", "InvalidClientTokenId", "UnrecognizedClientException"),
    *("InvalidAuthenticationInfo", "InvalidSecurity"),
}
_THROTTLED = {"SlowDown", "ServerBusy", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
_FIND_CREDENTIALS = ("169.254.169.254", "169.254.170.2", "metadata.google", "token request", "TokenRequest")
_UNSUPPORTED = 501
_OUT_OF_RANGE = re.compile(r"status code: 416|Invalid range")
_NEEDED = {
    "s3": "s3:PutObject, s3:GetObject, s3:ListBucket and s3:DeleteObject",
    "gs": "storage.objects.create, .get, .list and .delete",
    "az": "the role Storage Blob Data Contributor",
    "memory": "nothing",
}


def error_of(url: BucketUrl, place: str, error: Exception) -> MemstoreError | OSError:
    """Returns memstore's error for one of obstore's.

    Args:
        url: where the snapshot is.
        place: the URL of the object that the request was about.
    """
    text = str(error).partition("\n\nDebug source:")[0]
    kind = type(error).__name__
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    code = next(filter(None, found.groups()), "") if (found := _CODE.search(text)) else ""
    told = found[1].strip() if (found := _TOLD.search(text)) else ""
    said = f"{status or ''} {code or kind}{f' ({told})' if told else ''}".strip()
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return AlreadyExistsError(f"{place} exists: nothing was written")
    if code in _NO_BUCKET or "specified bucket does not exist" in text:
        return NoBucketError(
            f"{place}: there is no bucket {url.bucket!r} ({said}): check its name and its region "
            '(storage_options={"region": ...}), or make it first'
        )
    if code in _WRONG_CLOCK:
        return CredentialsError(
            f"{place}: this host's clock is off, so the service refuses its signatures ({said}): set the clock"
        )
    if code in _WRONG_CREDENTIALS:
        return CredentialsError(
            f"{place}: the credentials are expired or wrong ({said}): renew them, and call again; what was uploaded "
            "so far is used then"
        )
    is_wrong_key = "Invalid Access Key" in text or (code == "AuthorizationFailure" and "failed to authenticate" in told)
    if is_wrong_key:
        return CredentialsError(f"{place}: the credentials are wrong ({said}): {_say_credentials(url)}")
    if any(mark in text for mark in _FIND_CREDENTIALS) and status not in (429, 503):
        return CredentialsError(
            f"{place}: no credentials were found ({first_line(error):.200}): {_say_credentials(url)}"
        )
    denied = status in (401, 403) or kind in ("PermissionDeniedError", "UnauthenticatedError")
    if isinstance(error, PermissionError) or denied:
        return PermissionDeniedError(
            f"{place}: the service denies it ({said}): the credentials need {_NEEDED[url.scheme]} for this path"
        )
    if isinstance(error, FileNotFoundError) or kind == "NotFoundError":
        return KeyNotFoundError(f"{place} is missing")
    if (
        kind in ("NotSupportedError", "NotImplementedError")
        or status == _UNSUPPORTED
        or code == "NotImplemented"
        or "not implemented" in text
    ):
        return UnsupportedFilesystemError(f"{place}: the service can't do this ({said})")
    if status == 429 or code in _THROTTLED:
        return ThrottledError(
            f"{place}: the service wants fewer requests ({said}): wait and call again, with fewer processes at once; "
            "what was uploaded so far is used then",
            path=place,
        )
    if "Account must be specified" in text:
        return CredentialsError(f"{place}: no account was given: {_say_credentials(url)}")
    if "UnknownConfigurationKey" in kind:
        return UnsupportedValueError(f"{place}: {text:.300}: {_say_credentials(url)}")
    failure = f"it answered {said}" if status else f"it can't be reached: {_cause_of(text)}"
    code_of = errno.ETIMEDOUT if "timed out" in str(error) or "TimedOut" in str(error) else errno.EIO
    return StorageError(
        f"{place}: the service fails, also after repeated requests ({failure}): check the network and the address, "
        "and call again; what was uploaded so far is used then",
        code=code_of,
        path=place,
    )


def _say_credentials(url: BucketUrl) -> str:
    return {
        "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give them as storage_options",
        "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or give storage_options={'service_account': PATH}",
        "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or give them as storage_options",
        "memory": "none are needed",
    }[url.scheme]


def _cause_of(text: str) -> str:
    """Returns the last part of obstore's text, without the request that it begins with."""
    return re.sub(r"\s+", " ", text.rpartition(" - ")[2])[:200]
