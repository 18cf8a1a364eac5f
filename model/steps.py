"""What belongs to a step: its seed (SPEC 2), its digits of fitness, five in a byte (SPEC 8), and their sums over chunks
(SPEC 21). A coordinator starts without NumPy, which the sums need."""

INITIAL_SEED = 42
COOLINGS, HOT = 20, 0.3      # levels of the rate before a planned end, and the share of the run before the first
_BYTES = bytes(range(243))                               # 3^5 of them
# k -> the table that takes a byte to its digit k as int8: 0, 1 or -1
_DIGITS = [bytes((0, 1, 255)[b // 3 ** k % 3] for b in _BYTES) + bytes(13) for k in range(5)]
_VALUES = bytes((0, 1)) + bytes(253) + b"\2"             # of a digit


def hash32(seed, i):
    """`hash32` of model.rules in Python ints, without its casts: to open a history is to hash once a step."""
    x = seed + i * 0x9E3779B9 & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def first_seed(cfg):
    """Seed of step 0. The hash is one to one: no two islands have the same, with NOISE_REUSE = 1 at any step."""
    return hash32(INITIAL_SEED, cfg.ISLAND_SEED) if cfg.ISLAND_SEED else INITIAL_SEED


def next_seed(seed, step, reuse=1):
    """Seed of step + 1 from the seed of `step`, which is kept for `reuse` steps (0: for ever)."""
    return seed if not reuse or (step + 1) % reuse else hash32(seed, step + 1)


def packed_size(count):
    """Bytes of `count` packed digits."""
    return -(-count // 5)


def pack_digits(digits):
    """bytes: the int8 values of {-1, 0, 1} in `digits` (bytes or an array), five a byte, least significant digit first
    (-1 is digit 2)."""
    digits = bytes(digits)
    size = packed_size(len(digits))
    values = digits.translate(_VALUES).ljust(5 * size, b"\0")
    # no byte exceeds 242, so sums of whole numbers have no carry from one byte into the next
    total = sum(3 ** k * int.from_bytes(values[k::5], "little") for k in range(5))
    return total.to_bytes(size, "little")


def check_digits(packed, count):
    """Raises ValueError for another size than that of `count` digits, a wrong byte or a digit beyond `count`."""
    if len(packed) != packed_size(count):
        raise ValueError(f"{len(packed)} bytes of fitness where {count} values need {packed_size(count)}")
    if wrong := packed.translate(None, _BYTES):
        raise ValueError(f"byte {max(wrong)} is not five ternary digits")
    if count % 5 and packed[-1] >= 3 ** (count % 5):
        raise ValueError("digits after the last value")


def unpack_digits(packed, count):
    """bytearray [count]: the int8 values in packed bytes. Raises ValueError, see `check_digits`."""
    check_digits(packed, count)
    digits = bytearray(5 * len(packed))
    for k, table in enumerate(_DIGITS):
        digits[k::5] = packed.translate(table)
    return digits[:count]


def sums_of(cfg, data=b""):
    """int8 or int16 [5, CHUNK_DIGITS / 5]: the sums of digits over chunks, digit 5 i + k at [k, i], from the bytes of a
    step of unit trials; zeros without any."""
    import numpy as np
    kind, size = np.dtype("i1" if cfg.N_CHUNKS <= 127 else "<i2"), cfg.CHUNK_DIGITS // 5
    if data and cfg.SUMMED:
        return np.frombuffer(data[:-1], kind).reshape(5, size)
    sums = np.zeros((5, size), kind)
    for at in range(0, len(data) - 1, size):
        add_digits(sums, data[at:at + size])
    return sums


def add_digits(sums, packed, sign=1):
    """Adds the packed digits of a chunk to sums as `sums_of`, in place."""
    import numpy as np
    for its, table in zip(sums, _DIGITS):
        its += sign * np.frombuffer(packed.translate(table), np.int8)


def check_step(cfg, data):
    """Raises ValueError for bytes that are no step of this configuration."""
    if len(data) != cfg.STEP_BYTES:
        raise ValueError(f"{len(data)} bytes where a step has {cfg.STEP_BYTES}")
    if cfg.SUMMED:
        sums = sums_of(cfg, data)
        if not -cfg.N_CHUNKS <= sums.min() <= sums.max() <= cfg.N_CHUNKS:
            raise ValueError(f"sums of more than {cfg.N_CHUNKS} digits")
    elif cfg.PERTURB == "weights":
        check_digits(data, cfg.N_PAIRS)
    else:
        check_digits(data[:-1], cfg.N_CHUNKS * cfg.CHUNK_DIGITS)


def join_digits(cfg, chunks, cooling=0, sums=None):
    """bytes: a step, from the packed digits of its chunks: these, or, with unit trials and more than two chunks, their
    sums, which need not be made where they are given. With unit trials a byte follows, 0 to COOLINGS - 1: by how much
    the rate of this step is lower than LR_SCHEDULE says."""
    count = cfg.CHUNK_DIGITS
    if cfg.PERTURB == "units":
        if cfg.SUMMED and sums is None:
            sums = sums_of(cfg)
            for packed in chunks:
                add_digits(sums, packed)
        return b"".join((*(chunks if sums is None else [sums]), bytes([cooling])))
    if count % 5 == 0 or len(chunks) == 1:
        return b"".join(chunks)
    return pack_digits(b"".join(unpack_digits(chunk, count) for chunk in chunks))


def cooling_at(done):
    """The cooling of a step when this share of the planned time or steps is done: rates fall by and by, to a twentieth
    at the end."""
    return max(0, min(COOLINGS - 1, int((done - HOT) / (1 - HOT) * COOLINGS)))


def learning_rate(cfg, step, fitness):
    """float: the rate of `step`, whose bytes (join_digits) are `fitness`."""
    cooling = min(fitness[-1], COOLINGS - 1) if cfg.PERTURB == "units" else 0
    return cfg.learning_rate(step) * (1 - cooling / COOLINGS)
