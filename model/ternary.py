"""Fitness digits, five in a byte (SPEC 8), with the standard library alone: a coordinator needs no NumPy."""

_BYTES = bytes(range(243))                               # 3^5 of them
# k -> the table that takes a byte to its digit k as int8: 0, 1 or -1
_DIGITS = [bytes((0, 1, 255)[b // 3 ** k % 3] for b in _BYTES) + bytes(13) for k in range(5)]
_VALUES = bytes((0, 1)) + bytes(253) + b"\2"             # of a digit


def packed_size(count):
    """Bytes of `count` packed digits."""
    return -(-count // 5)


def pack(digits):
    """bytes: the int8 values of {-1, 0, 1} in `digits` (bytes), five a byte, least significant digit first (-1 is digit
    2)."""
    size = packed_size(len(digits))
    values = digits.translate(_VALUES).ljust(5 * size, b"\0")
    # no byte exceeds 242, so sums of whole numbers have no carry from one byte into the next
    total = sum(3 ** k * int.from_bytes(values[k::5], "little") for k in range(5))
    return total.to_bytes(size, "little")


def check(packed, count):
    """Raises ValueError for another size than that of `count` digits, a wrong byte or a digit beyond `count`."""
    if len(packed) != packed_size(count):
        raise ValueError(f"{len(packed)} bytes of fitness where {count} values need {packed_size(count)}")
    if wrong := packed.translate(None, _BYTES):
        raise ValueError(f"byte {max(wrong)} is not five ternary digits")
    if count % 5 and packed[-1] >= 3 ** (count % 5):
        raise ValueError("digits after the last value")


def unpack(packed, count):
    """bytearray [count]: the int8 values in packed bytes. Raises ValueError, see `check`."""
    check(packed, count)
    digits = bytearray(5 * len(packed))
    for k, table in enumerate(_DIGITS):
        digits[k::5] = packed.translate(table)
    return digits[:count]


def nonzero_share(packed):
    """Share of the packed digits that are not 0, in a sample of at most 2^13 bytes."""
    sample = packed[::max(1, len(packed) >> 12)]
    return 1 - sum(sample.translate(table).count(0) for table in _DIGITS) / (5 * len(sample))


def join(chunks, count):
    """bytes: packed chunks of `count` digits each, packed as one."""
    if count % 5 == 0 or len(chunks) == 1:
        return b"".join(chunks)
    return pack(b"".join(unpack(chunk, count) for chunk in chunks))
