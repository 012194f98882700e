"""Keys of encrypted checkpoints: what `key=` may be, and how it protects the data key of a checkpoint.

    key= (32 bytes | passphrase, by scrypt | object that wraps keys)  ->  key-encryption key, 32 bytes
    key-encryption key  ->  wraps  ->  data key: random, one per checkpoint  ->  encrypts  ->  segments of its files

The key-encryption key is made once per writer or call. A file has its *recipe*: what is needed besides `key=` to get
the key-encryption key again (salt and cost of scrypt, or the wrapped key). A recipe from a file is untrusted.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import unicodedata
from typing import Any, Final, NoReturn, Protocol, cast, runtime_checkable

from ..errors import ArgumentError, ArgumentTypeError, CheckpointError, DependencyError, WrongKey
from ..options import how_to_install, shown

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
WRAPPED_BYTES: Final = NONCE_BYTES + KEY_BYTES + TAG_BYTES
"""Bytes of a data key that a key-encryption key has wrapped."""
MAX_WRAPPED: Final = 16 << 10
"""Bytes of a key that a `KeyWrapper` has wrapped."""
_SALT_BYTES: Final = 16
_COSTS: Final = range(10, 19)
"""log2 of scrypt's N. A file may ask for no more: 18 takes 256 MiB and about a second."""
_BLOCK, _LANES = 8, 1  # scrypt's r and p


@runtime_checkable
class KeyWrapper(Protocol):
    """An object for `key=` that wraps keys, for a key management service or a hardware module.

    A `CheckpointWriter` calls `wrap` once, with a random key of 32 bytes; every file that it writes has the result.
    Loading a file calls `unwrap` with that. Both are called in the process of the caller, never in the writing process.
    """

    def wrap(self, key: bytes) -> bytes:
        """The wrapped key: at most 16 KiB that only `unwrap` can turn back into `key`."""

    def unwrap(self, wrapped: bytes) -> bytes:
        """The key of 32 bytes. May raise whatever fits; the message of a `CheckpointError` names the type."""


class Passphrase:
    """A passphrase for `key=` with a cost of its own; a `str` is one with the default cost.

    Args:
        text: the passphrase; equal ones in another Unicode form are the same (NFC).
        cost: log2 of scrypt's N, 10 to 18. The default, 17, takes 128 MiB and about half a second per writer, and per
            file that is loaded.
    """

    __slots__ = ("_text", "cost")

    def __init__(self, text: str, *, cost: int = 17) -> None:
        if not isinstance(text, str):
            raise ArgumentTypeError(f"a passphrase must be a str, not {type(text).__name__}")
        if not text:
            raise ArgumentError("the passphrase is empty")
        if isinstance(cost, bool) or not isinstance(cost, int):
            raise ArgumentTypeError(f"cost must be an int, not {type(cost).__name__}")
        if cost not in _COSTS:
            raise ArgumentError(f"cost={cost}: pass {_COSTS[0]} to {_COSTS[-1]}, log2 of scrypt's N")
        self._text = text
        self.cost = cost

    def stretch(self, salt: bytes, cost: int) -> bytes:
        """The key-encryption key, by scrypt."""
        text = unicodedata.normalize("NFC", self._text).encode("utf-8", "surrogatepass")
        room = (1 << cost) * _BLOCK * 128 + (1 << 20)
        return hashlib.scrypt(
            text, salt=salt, n=1 << cost, r=_BLOCK, p=_LANES, maxmem=room, dklen=KEY_BYTES
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Passphrase cost={self.cost}>"

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError("a passphrase is not pickled: pass it to the other process by other means")


Key = bytes | str | Passphrase | KeyWrapper
"""What `key=` takes: 32 bytes, a passphrase, or an object that wraps keys."""


def check_key(key: object) -> bytes | Passphrase | KeyWrapper:
    """Check `key=`. Raises `ArgumentTypeError`, `ArgumentError`, `DependencyError`."""
    import_aes()
    if isinstance(key, (bytes, bytearray, memoryview)):
        found = bytes(key)
        if len(found) != KEY_BYTES:
            raise ArgumentError(f"key= has {len(found)} bytes, AES-256 takes {KEY_BYTES}: pass a passphrase as a str")
        return found
    if isinstance(key, str):
        return Passphrase(key)
    if isinstance(key, Passphrase):
        return key
    if isinstance(key, KeyWrapper) and not isinstance(key, type):
        return key
    raise ArgumentTypeError(
        f"key= is a {type(key).__name__}: pass {KEY_BYTES} bytes, a passphrase (str), or an object with wrap() and "
        "unwrap()"
    )


def import_aes() -> Any:
    """The class `AESGCM` of `cryptography`; `DependencyError` where that is missing or too old."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        raise DependencyError(
            f"encryption needs cryptography, which is not installed: {how_to_install('crypto')}", name="cryptography"
        ) from None
    if not hasattr(AESGCM, "encrypt_into"):
        raise DependencyError(
            f"encryption needs a newer cryptography, with AESGCM.encrypt_into: {how_to_install('crypto')}",
            name="cryptography",
        )
    return AESGCM


def invalid_tag() -> type[Exception]:
    """The exception of `cryptography` for what is not authentic."""
    from cryptography.exceptions import InvalidTag

    return cast("type[Exception]", InvalidTag)


class MasterKey:
    """A key-encryption key with its recipe."""

    __slots__ = ("_secret", "recipe")

    def __init__(self, secret: bytes, recipe: dict[str, Any]) -> None:
        self._secret, self.recipe = secret, recipe

    @classmethod
    def of(cls, key: object) -> MasterKey:
        """A key-encryption key for new files. Calls scrypt or the wrapper."""
        found = check_key(key)
        if isinstance(found, bytes):
            return cls(found, {"by": "key"})
        if isinstance(found, Passphrase):
            salt = os.urandom(_SALT_BYTES)
            return cls(found.stretch(salt, found.cost), {"by": "scrypt", "salt": salt.hex(), "cost": found.cost})
        secret = os.urandom(KEY_BYTES)
        wrapped = found.wrap(secret)
        if not isinstance(wrapped, bytes) or not 0 < len(wrapped) <= MAX_WRAPPED:
            raise ArgumentTypeError(f"key=: wrap() must return 1 to {MAX_WRAPPED} bytes")
        return cls(secret, {"by": "wrapper", "wrapped": base64.b64encode(wrapped).decode("ascii")})

    def wrap(self, data_key: bytes, bound: bytes) -> bytes:
        """A data key for a file; it opens only together with the bytes `bound`."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + cast("bytes", import_aes()(self._secret).encrypt(nonce, data_key, bound))

    def unwrap(self, wrapped: bytes, bound: bytes) -> bytes | None:
        """The data key of a file; None if the key or the bytes `bound` are others."""
        try:
            nonce, sealed = wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:]
            return cast("bytes", import_aes()(self._secret).decrypt(nonce, sealed, bound))
        except invalid_tag():
            return None

    def dump(self) -> bytes:
        """All of it, for a writing process."""
        return json.dumps({"secret": self._secret.hex(), "recipe": self.recipe}).encode("ascii")

    @classmethod
    def load(cls, data: bytes) -> MasterKey:
        """What `dump` gave."""
        found = json.loads(data)
        return cls(bytes.fromhex(found["secret"]), found["recipe"])

    def __repr__(self) -> str:
        return f"<MasterKey by {self.recipe['by']}>"

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError("a key is not pickled")


class KeyRing:
    """The key-encryption keys that `key=` gives for the files of one call: one for each recipe.

    option: how the user passes the key, for errors
    """

    def __init__(self, key: object, option: str = "key=") -> None:
        self._key, self._option = check_key(key), option
        self._made: dict[str, MasterKey] = {}

    def master(self, recipe: dict[str, Any], label: str) -> MasterKey:
        """The key-encryption key for a checked recipe. Raises `WrongKey` if the file needs another kind of key."""
        name = json.dumps(recipe, sort_keys=True)
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = MasterKey(self._secret(recipe, label), recipe)
        return found

    def _secret(self, recipe: dict[str, Any], label: str) -> bytes:
        key, by = self._key, recipe["by"]
        if isinstance(key, bytes) and by == "key":
            return key
        if isinstance(key, Passphrase) and by == "scrypt":
            return key.stretch(bytes.fromhex(recipe["salt"]), recipe["cost"])
        if not isinstance(key, (bytes, Passphrase)) and by == "wrapper":
            try:
                secret = key.unwrap(base64.b64decode(recipe["wrapped"]))
            except Exception as error:  # whatever a key service raises; its text might name secrets
                raise WrongKey(f"{label}: the unwrap() of key= raised {type(error).__name__}") from error
            if not isinstance(secret, bytes) or len(secret) != KEY_BYTES:
                raise WrongKey(f"{label}: the unwrap() of key= returned no {KEY_BYTES} bytes")
            return secret
        needed = {"key": f"{KEY_BYTES} bytes", "scrypt": "a passphrase", "wrapper": "an object that wraps keys"}[by]
        raise WrongKey(f"{label} was encrypted with {needed}, and {self._option} is something else: pass that")

    def __repr__(self) -> str:
        return "<KeyRing>"


def check_recipe(found: Any, label: str) -> dict[str, Any]:
    """A recipe from a file, checked before any work is done for it. Raises `CheckpointError`."""
    match found:
        case {"by": "key"} if len(found) == 1:
            return {"by": "key"}
        case {"by": "scrypt", "salt": str() as salt, "cost": int() as cost} if len(found) == 3:
            if type(cost) is int and cost in _COSTS and len(salt) == 2 * _SALT_BYTES and _is_hex(salt):
                return {"by": "scrypt", "salt": salt, "cost": cost}
        case {"by": "wrapper", "wrapped": str() as wrapped} if len(found) == 2:
            if 0 < len(wrapped) <= 2 * MAX_WRAPPED and _is_base64(wrapped):
                return {"by": "wrapper", "wrapped": wrapped}
    raise CheckpointError(f"{label}: its header does not say how it was encrypted: {shown(found, 120)}")


def _is_hex(text: str) -> bool:
    return all(each in "0123456789abcdef" for each in text)


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True
