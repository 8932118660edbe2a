"""The pieces of SecAgg+ (Bell et al., 2020): keys, shares of secrets, and masks that cancel in a sum.

Keys, key agreement, encryption and secret sharing are Flower's own. Masks are ChaCha20 key streams: Flower's own
generator reduces a seed to 32 bits, and whoever holds a masked vector can try all of them.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fedpmt.flower.secure.layer_vector import Words

SEED_BYTES = 31
"""With its padding, two blocks of the secret sharing."""

NEIGHBOURS = 40
"""How many others share masks and secrets with a device, at most; in a small cohort all do."""

WORD = np.dtype("<u4")


def new_key() -> tuple[bytes, bytes]:
    """Make a private key and its public half, serialised."""
    private, public = generate_key_pairs()
    return private_key_to_bytes(private), public_key_to_bytes(public)


def public_half(private: bytes) -> bytes:
    """The public half of a private key."""
    return bytes(public_key_to_bytes(bytes_to_private_key(private).public_key()))


def is_public_key(data: bytes) -> bool:
    """Whether this is a public key of the curve used here, in its canonical form."""
    try:
        key = bytes_to_public_key(data)
    except ValueError:
        return False
    curve = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)
    return curve and public_key_to_bytes(key) == data


def agree(private: bytes, public: bytes) -> bytes:
    """Derive the secret that two devices share, from one's private and the other's public key."""
    return bytes(generate_shared_key(bytes_to_private_key(private), bytes_to_public_key(public)))


def mask(secret: bytes, group: int, size: int) -> Words:
    """Expand a secret into the mask of one group of the vector; every group has its own key stream."""
    derived = HKDF(hashes.SHA256(), 32, salt=None, info=b"fedpmt secagg %d" % group).derive(secret)
    stream = Cipher(algorithms.ChaCha20(derived, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(WORD.itemsize * size)), WORD).astype(np.uint32)


def apply_pair(total: Words, secret: bytes, group: int, *, adds: bool) -> None:
    """Apply the mask of a pair of devices in place: one of them adds it, the other subtracts it."""
    words = mask(secret, group, len(total))
    if adds:
        total += words
    else:
        total -= words


def threshold(holders: int) -> int:
    """How many shares open a secret: more than half, so that two different sets of nodes cannot both be opened.

    >>> [threshold(holders) for holders in (2, 3, 4, 5)]
    [2, 2, 3, 3]
    """
    return holders // 2 + 1


def neighbourhoods(nodes: Iterable[int]) -> dict[int, list[int]]:
    """Which nodes hold shares of a node's secrets, itself among them: its neighbours on a circle in random order."""
    order = sorted(nodes)
    random.SystemRandom().shuffle(order)
    count, half = len(order), NEIGHBOURS // 2
    if count <= 2 * half + 1:
        return {node: sorted(order) for node in order}
    return {
        node: sorted(order[(place + step) % count] for step in range(-half, half + 1))
        for place, node in enumerate(order)
    }


def commit(seed: bytes) -> bytes:
    """Hash a seed, so that a reconstructed one can be checked; the hash of a random seed tells nothing about it."""
    return hashlib.sha256(seed).digest()


def split(secret: bytes, holders: int) -> list[bytes]:
    """Split a secret into one share for each holder."""
    return list(create_shares(secret, threshold(holders), holders))


def combine(shares: Sequence[bytes], holders: int) -> bytes:
    """Reconstruct a secret from enough of its shares."""
    return bytes(combine_shares(list(shares)[: threshold(holders)]))


def seal(secret: bytes, sender: int, receiver: int, key_share: bytes, seed_shares: Sequence[bytes]) -> bytes:
    """Encrypt a letter to one receiver: its shares of the sender's secrets."""
    plain = share_keys_plaintext_concat(sender, receiver, b"".join(seed_shares), key_share)
    return bytes(encrypt(secret, plain))


def unseal(secret: bytes, sender: int, receiver: int, letter: bytes) -> tuple[bytes, bytes]:
    """Decrypt a letter: the share of the key, and the shares of all seeds in one piece.

    Raises:
        ValueError: The letter is not from this sender to this receiver.
    """
    source, target, seed_shares, key_share = share_keys_plaintext_separate(decrypt(secret, letter))
    if (source, target) != (sender, receiver):
        raise ValueError(f"a letter from node {source} to {target} came as one from {sender} to {receiver}")
    return key_share, seed_shares
