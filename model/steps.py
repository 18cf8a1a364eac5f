"""What belongs to a step: its seed (SPEC 2), its digits of fitness, some in a byte (SPEC 8), and their sums over chunks
(SPEC 21). A coordinator starts without NumPy, which the sums need."""

import functools
import itertools
from typing import NamedTuple

import egg_config

INITIAL_SEED = 42
IN_CACHE = 1 << 14           # sums that are made at once, with what NumPy needs for it
COOLINGS, HOT = 20, 0.3      # levels of the rate before a planned end, and the share of the run before the first


class Packing(NamedTuple):
    """How digits of an odd number of values, -n to n, lie in bytes, the least significant first."""
    digits: int              # in a byte
    bytes: bytes             # that occur
    places: tuple            # tables from a byte to each of its digits, int8
    numbers: bytes           # the table from a digit, int8, to its number in a byte: that modulo `values`


@functools.cache
def packing(values=3):
    """The Packing of digits of so many values; 3: those of SPEC 8, five in a byte."""
    digits = egg_config.digits_a_byte(values)
    signed = [d if d <= values // 2 else d - values + 256 for d in range(values)]
    places = tuple(bytes(signed[byte // values ** k % values] if byte < values ** digits else 0 for byte in range(256))
                   for k in range(digits))
    numbers = bytes((x if x < 128 else x - 256) % values for x in range(256))
    return Packing(digits, bytes(range(values ** digits)), places, numbers)


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


def packed_size(count, values=3):
    """Bytes of `count` packed digits of so many values."""
    return -(-count // packing(values).digits)


def pack_digits(digits, values=3):
    """bytes: int8 digits (bytes or an array), packed."""
    digits, way = bytes(digits), packing(values)
    size = packed_size(len(digits), values)
    numbers = digits.translate(way.numbers).ljust(way.digits * size, b"\0")
    # no byte exceeds 255, so sums of whole numbers have no carry from one byte into the next
    total = sum(values ** k * int.from_bytes(numbers[k::way.digits], "little") for k in range(way.digits))
    return total.to_bytes(size, "little")


def check_digits(packed, count, values=3):
    """Raises ValueError for another size than that of `count` digits, a wrong byte or a digit beyond `count`."""
    way, size = packing(values), packed_size(count, values)
    if len(packed) != size:
        raise ValueError(f"{len(packed)} bytes of fitness where {count} values need {size}")
    if wrong := packed.translate(None, way.bytes):
        raise ValueError(f"byte {max(wrong)} is not {way.digits} digits of {values} values")
    if count % way.digits and packed[-1] >= values ** (count % way.digits):
        raise ValueError("digits after the last value")


def unpack_digits(packed, count, values=3):
    """bytearray [count]: the int8 digits in packed bytes. Raises ValueError, see `check_digits`."""
    check_digits(packed, count, values)
    way = packing(values)
    digits = bytearray(way.digits * len(packed))
    for k, table in enumerate(way.places):
        digits[k::way.digits] = packed.translate(table)
    return digits[:count]


class Sums:
    """The sums of the terms of digits over the chunks of a step. A number of uint64 [CHUNK_BYTES] has those of the n
    digits of a byte, each in 64 // n bits and more by half of their range, so that one lookup and one addition add a
    byte, and nothing is carried."""

    def __init__(self, cfg):
        import numpy as np
        self._cfg, n = cfg, packing(cfg.DIGIT_VALUES).digits
        self._bits = 64 // n
        half = 1 << self._bits - 1
        self._totals = np.full(cfg.CHUNK_BYTES, sum(half << self._bits * k for k in range(n)), np.uint64)
        self._parts = [slice(at, at + IN_CACHE) for at in range(0, cfg.CHUNK_BYTES, IN_CACHE)]

    def add(self, packed, sign=1):
        """Adds the packed digits of a chunk, or takes them back: sign -1."""
        import numpy as np
        table = _terms_of_bytes(self._cfg.DIGIT_VALUES, self._cfg.N_CHUNKS if self._cfg.LOCAL_STEPS > 1 else 1)
        table, numbers = table if sign > 0 else -table, np.frombuffer(packed, np.uint8)
        for part in self._parts:
            # modulo 2^64; mode: no byte is beyond the table, and without a check it takes a third of the time
            self._totals[part] += np.take(table, numbers[part], mode="clip")

    def planes(self):
        """int8 or int16 [n, CHUNK_BYTES]: the sum of digit n i + k at [k, i]."""
        import numpy as np
        n, bits = packing(self._cfg.DIGIT_VALUES).digits, self._bits
        planes = np.empty((n, self._totals.size), sum_kind(self._cfg))
        for k, part in itertools.product(range(n), self._parts):
            sums = self._totals[part] >> bits * k
            # the lowest bits that a sum has, where the others are those of half the range
            planes[k, part] = sums if bits >= 8 * planes.itemsize else (sums & (1 << bits) - 1) - (1 << bits - 1)
        return planes


@functools.cache
def _terms_of_bytes(values, chunks):
    """uint64 [256]: the terms of the digits in a byte, as in `Sums`. A term is the digit itself. With LOCAL_STEPS a
    digit is 3 q + e, with e from -1 to 1, and its term is q (2 chunks + 1) + e: sums of q and of e stay apart."""
    import numpy as np
    places = np.array([np.frombuffer(place, np.int8) for place in packing(values).places], np.int64)
    terms = places + 2 * (chunks - 1) * ((places + 1) // 3)
    return sum(term << 64 // len(terms) * k for k, term in enumerate(terms)).view(np.uint64)


def sum_kind(cfg):
    """The dtype of sums in the bytes of a step."""
    return "<i2" if cfg.WIDE_SUMS else "i1"


def sums_of(cfg, data):
    """int8 or int16 [n, CHUNK_BYTES]: Sums.planes of the bytes of a step of unit trials."""
    import numpy as np
    if cfg.SUMMED:
        return np.frombuffer(data[:-1], sum_kind(cfg)).reshape(-1, cfg.CHUNK_BYTES)
    sums = Sums(cfg)
    for at in range(0, len(data) - 1, cfg.CHUNK_BYTES):
        sums.add(data[at:at + cfg.CHUNK_BYTES])
    return sums.planes()


def check_step(cfg, data):
    """Raises ValueError for bytes that are no step of this configuration."""
    if len(data) != cfg.STEP_BYTES:
        raise ValueError(f"{len(data)} bytes where a step has {cfg.STEP_BYTES}")
    if cfg.SUMMED:
        sums, most = sums_of(cfg, data), cfg.LARGEST_SUM
        if not -most <= sums.min() <= sums.max() <= most:
            raise ValueError(f"sums of more than {cfg.N_CHUNKS} digits")
    elif cfg.PERTURB == "weights":
        check_digits(data, cfg.N_PAIRS)
    else:
        check_digits(data[:-1], cfg.N_CHUNKS * cfg.CHUNK_DIGITS, cfg.DIGIT_VALUES)


def join_digits(cfg, chunks, cooling=0, sums=None):
    """bytes: a step, from the packed digits of its chunks: these, or, with unit trials and more than two chunks, their
    sums, which need not be made where they are given. With unit trials a byte follows, 0 to COOLINGS - 1: by how much
    the rate of this step, with LOCAL_STEPS of the next one, is lower than LR_SCHEDULE says."""
    count = cfg.CHUNK_DIGITS
    if cfg.PERTURB == "units":
        if cfg.SUMMED and sums is None:
            sums = Sums(cfg)
            for packed in chunks:
                sums.add(packed)
        return b"".join((*(chunks if sums is None else [sums.planes()]), bytes([cooling])))
    if count % 5 == 0 or len(chunks) == 1:
        return b"".join(chunks)
    return pack_digits(b"".join(unpack_digits(chunk, count) for chunk in chunks))


def cooling_at(done):
    """The cooling of a step when this share of the planned time or steps is done: rates fall by and by, to a twentieth
    at the end."""
    return max(0, min(COOLINGS - 1, int((done - HOT) / (1 - HOT) * COOLINGS)))


def cooling_of(cfg, fitness):
    """int: the cooling that the bytes of a step state; 0 with noise on weights."""
    return min(fitness[-1], COOLINGS - 1) if cfg.PERTURB == "units" else 0


def known_cooling(cfg, overlay):
    """int: with LOCAL_STEPS, the cooling of a step, which its chunks know: what the step before has left in the first
    entry of the overlay. A state of another kind has none there."""
    return int(overlay[0]) if cfg.LOCAL_STEPS > 1 and 0 <= overlay[0] < COOLINGS else 0


def learning_rate(cfg, update, cooling=0):
    """float: the rate of the update with this number in a run, which is a step, or a local step of a chunk."""
    return cfg.learning_rate(update) * (1 - cooling / COOLINGS)
