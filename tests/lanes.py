"""The CUDA kernels of the pass over rows (kernels.reading) as Python, for tests without a GPU: a thread of the
processor for every lane, exact integers, checked bounds, and NumPy in place of the tensor cores."""

import threading
from types import CellType, FunctionType, SimpleNamespace

import numpy as np
from numba import cuda, float32, float64, int8, int16, int32, int64, uint8, uint32, uint64
from numba.cuda import libdevice

from kernels import ptx, units
from kernels.parts import A16
from model import parameters

HERE = threading.local()     # of a lane: its block, its place, how many shared arrays it has asked for
LOCK = threading.Lock()
ALONE = {"pack", "embed", "inner"}          # kernels whose threads exchange nothing


def wrapped(kind):
    """A function that casts a number to a type of numba."""
    bits = kind.bitwidth

    def cast(x):
        x = int(x) & (1 << bits) - 1
        return x - (1 << bits) if kind.signed and x >> bits - 1 else x
    return cast


CASTS = {kind: wrapped(kind) for kind in (int8, int16, int32, int64, uint8, uint32, uint64)}
CASTS |= {float32: np.float32, float64: float}
DTYPES = {cast: np.dtype(str(kind)) for kind, cast in CASTS.items()}
CASTS |= {dtype.type: cast for cast, dtype in DTYPES.items()}
to_int32 = CASTS[int32]


class Array:
    """An array whose integers are those of Python."""

    def __init__(self, values):
        self.values, self.cast = values, CASTS[values.dtype.type]

    def __getitem__(self, index):
        value = self.values[self.checked(index)]
        return Array(value) if isinstance(value, np.ndarray) else self.cast(value)

    def __setitem__(self, index, value):
        self.values[self.checked(index)] = self.cast(value)

    def checked(self, index):
        index = tuple(map(int, index if isinstance(index, tuple) else (index,)))
        assert all(0 <= i < size for i, size in zip(index, self.values.shape)), (index, self.values.shape)
        return index

    def load4(self, index):
        """Four int32 that begin with entry `index`."""
        first = int(index) * self.values.itemsize
        assert first % 16 == 0 and 0 <= first <= self.values.nbytes - 16
        return tuple(self.values.view(np.int32)[first // 4:first // 4 + 4].tolist())


def local_array(shape, kind):
    return Array(np.full(shape, 85, DTYPES[kind]))


def shared_array(shape, kind):
    HERE.arrays += 1
    with LOCK:
        return HERE.block.shared.setdefault(HERE.arrays, local_array(shape, kind))


def exchanged(value):
    """[32]: the value of each lane of the warp."""
    block, t = HERE.block, HERE.threadIdx.x
    block.given[t] = value
    block.warps[t >> 5].wait()
    values = block.given[t & ~31:(t | 31) + 1]
    block.warps[t >> 5].wait()
    return values


def of_lane(lane_of):
    """A function for an exchange of the warp; lane_of(lane, n): whose value a lane gets."""
    return lambda mask, value, n: exchanged(value)[lane_of(HERE.threadIdx.x & 31, int(n))]


def atomic(change):
    def at_once(array, index, value):
        with LOCK:
            before = array[index]
            array[index] = change(before, value)
        return before
    return at_once


class Place:
    """cuda.threadIdx and its like."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, axis):
        return getattr(getattr(HERE, self._name), axis)


CUDA = SimpleNamespace(
    local=SimpleNamespace(array=local_array), shared=SimpleNamespace(array=shared_array),
    atomic=SimpleNamespace(add=atomic(lambda a, b: a + b), min=atomic(min)),
    grid=lambda dimensions: HERE.blockIdx.x * HERE.blockDim.x + HERE.threadIdx.x,
    syncthreads=lambda: HERE.block.barrier.wait(), popc=lambda x: (x & 0xFFFFFFFF).bit_count(),
    shfl_sync=of_lane(lambda lane, n: n & 31), shfl_xor_sync=of_lane(lambda lane, n: lane ^ n),
    shfl_up_sync=of_lane(lambda lane, n: lane - n if lane >= n else lane),
    **{name: Place(name) for name in ("threadIdx", "blockIdx", "blockDim", "gridDim")})


def bytes_of(word):
    return [CASTS[int8](word >> 8 * k) for k in range(4)]


def byte_permute(a, b, pick):
    eight, word = bytes_of(a) + bytes_of(b), 0
    for k in range(4):
        nibble = pick >> 4 * k & 15
        word |= (eight[nibble & 7] >> (7 if nibble & 8 else 0) & 255) << 8 * k
    return to_int32(word)


def down(x):
    """float32: the largest that is not above a longdouble."""
    near = np.float32(x)
    return near if near <= x else np.nextafter(near, np.float32(-np.inf))


PTX = dict(
    load4=Array.load4, byte_permute=byte_permute, trunc_f32=int, mad_wide=lambda a, b, c: a * b + c,
    dp4a=lambda a, b, c: to_int32(sum(x * y for x, y in zip(bytes_of(a), bytes_of(b))) + c),
    warp_sum=lambda x: to_int32(sum(exchanged(x))), warp_max=lambda x: max(exchanged(x)),
    float_bits=lambda x: int(x.view(np.int32)), bits_float=lambda x: np.int32(x).view(np.float32),
    add_down=lambda a, b: down(np.longdouble(a) + b), fma_down=lambda a, b, c: down(np.longdouble(a) * b + c))
STANDS_FOR = {id(getattr(ptx, name)): function for name, function in PTX.items()}
STANDS_FOR |= {id(ptx): SimpleNamespace(**PTX), id(cuda): CUDA, id(libdevice.fsub_rn): lambda a, b: a - b,
               id(libdevice.fdiv_rn): lambda a, b: a / b}
functions = {}               # {id of a function: (what stands for it, itself, so that its id stays)}


def translated(value):
    """What stands for a value that a kernel refers to."""
    if id(value) in STANDS_FOR:
        return STANDS_FOR[id(value)]
    if isinstance(value, FunctionType) or hasattr(value, "py_func"):
        return python(getattr(value, "py_func", value))
    return CASTS.get(value, value) if getattr(value, "__hash__", None) else value


def python(function):
    """A kernel or a device function as a lane runs it."""
    if id(function) not in functions:
        code, closure = function.__code__, function.__closure__ or ()
        new = FunctionType(code, {"__builtins__": __builtins__}, closure=tuple(CellType() for _ in closure))
        functions[id(function)] = new, function
        new.__globals__.update({name: translated(function.__globals__[name]) for name in code.co_names
                                if name in function.__globals__})
        for cell, old in zip(new.__closure__ or (), closure):
            cell.cell_contents = translated(old.cell_contents)
    return functions[id(function)][0]


def multiply(cfg, scaled, grid, x, x_words, w, w_at, w_words, deep, out, out_words):
    """What units._product_kernels does."""
    rows, columns, words = np.arange(128 * grid[1])[:, None], np.arange(128 * grid[0])[:, None], np.arange(16 * deep)
    x, w = x[rows * x_words + words], w[w_at + python(units.packed_word.py_func)(columns, words, w_words)]
    sums = x.view(np.int8).astype(np.int64) @ w.view(np.int8).T
    kind = np.int32
    if scaled and cfg.MODEL == "gru":
        sums, kind = (sums // parameters.divisor(cfg, cfg.HIDDEN_DIM)).clip(-127, 127), np.int8
    elif scaled:
        sums, kind = sums >> cfg.SHIFT_LOGIT, np.int16 if units.logit_type(cfg) is A16 else np.int32
    out.view(kind)[rows * out_words + columns.T] = sums


def run_block(function, arguments, threads, alone, **places):
    """Runs a block. Raises what one of its lanes raises."""
    block, errors = SimpleNamespace(shared={}, given=[None] * threads, barrier=threading.Barrier(threads),
                                    warps=[threading.Barrier(32) for _ in range(threads // 32)]), []

    def run(t):
        vars(HERE).update(block=block, arrays=0, threadIdx=SimpleNamespace(x=t), **places)
        try:
            function(*arguments)
        except Exception as error:
            errors.append(error)
            for barrier in [block.barrier, *block.warps]:    # else the others would wait for ever
                barrier.abort()

    if alone:
        [run(t) for t in range(threads)]
    else:
        lanes = [threading.Thread(target=run, args=[t]) for t in range(threads)]
        [lane.start() for lane in lanes]
        [lane.join() for lane in lanes]
    if errors:
        raise errors[0]


def launch(cfg, kernel, grid, threads, arguments):
    """Runs a kernel of a configuration, a numba dispatcher, on arrays of the host."""
    name, (wide, high) = kernel.py_func.__name__, grid if isinstance(grid, tuple) else (grid, 1)
    assert 0 < wide < 1 << 31 and 0 < high < 1 << 16
    if name in ("product", "scaled"):
        return multiply(cfg, name == "scaled", (wide, high), *map(np.asarray, arguments))
    arguments = [Array(np.asarray(value)) if isinstance(value, np.ndarray) else int(value) for value in arguments]
    for y in range(high):
        for x in range(wide):
            run_block(python(kernel.py_func), arguments, threads, name in ALONE, blockIdx=SimpleNamespace(x=x, y=y),
                      blockDim=SimpleNamespace(x=threads), gridDim=SimpleNamespace(x=wide, y=high))
