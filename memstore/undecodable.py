"""What msgspec raises for bytes that it can't decode.

Text that is no UTF-8 is a UnicodeDecodeError in MessagePack, which is no MsgspecError, and what nests too deeply a
RecursionError.
"""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
