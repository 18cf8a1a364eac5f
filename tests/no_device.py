"""What the CUDA engine asks of numba.cuda, without a GPU: arrays of the device lie on the host."""

from types import SimpleNamespace

import numpy as np


class HostArray(np.ndarray):
    """A device array that lies on the host."""

    def copy_to_device(self, other, stream=None):
        assert self.size == np.size(other) and self.dtype == np.asarray(other).dtype
        self.ravel()[:] = np.asarray(other).ravel()

    def copy_to_host(self, ary=None, stream=None):
        if ary is None:
            return np.array(self)
        ary[...] = self


def device_array(shape, dtype):
    """What lay there before is in it."""
    return np.full(np.prod(shape) * np.dtype(dtype).itemsize, 7, np.uint8).view(dtype).reshape(shape).view(HostArray)


def host_to_device(array, values, size, stream):
    assert size == array.nbytes
    array.copy_to_device(values)


# what the engine asks of numba.cuda.cudadrv.driver
DRIVER = SimpleNamespace(host_to_device=host_to_device, device_memset=lambda array, value, size, stream:
                         array.fill(value))


def names(device_array=device_array):
    """({name in numba.cuda: what stands in for it}, the device's memory, whose free bytes may be changed)."""
    stream = SimpleNamespace(handle=0, synchronize=lambda: None)
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    card = SimpleNamespace(name="a GPU", compute_capability=(9, 0), MULTIPROCESSOR_COUNT=132)
    memory = SimpleNamespace(free=1 << 33, total=1 << 34)
    return dict(select_device=lambda device: None, get_current_device=lambda: card, stream=lambda: stream,
                event=lambda timing: event, device_array=device_array, pinned_array=np.zeros,
                cudadrv=SimpleNamespace(driver=DRIVER),
                device_array_like=lambda array: device_array(array.shape, array.dtype),
                to_device=lambda array, stream=None: np.array(array).view(HostArray),
                current_context=lambda: SimpleNamespace(get_memory_info=lambda: memory)), memory
