"""numba's simulator of CUDA (NUMBA_ENABLE_CUDASIM=1), changed where this file is imported: the threads of a block take
turns, between two barriers each in an order drawn anew. numba's own asks all of them without end whether they wait,
which takes longer than what they do."""

import random
import threading

import numpy as np
from numba.cuda.simulator import kernel


class Thread(kernel.BlockThread):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.turn, self.over, self.ended = threading.Lock(), threading.Lock(), False
        self.turn.acquire()
        self.over.acquire()

    def run(self):
        self.turn.acquire()
        super().run()
        self.ended = True
        self.over.release()

    def syncthreads(self):
        self.over.release()
        self.turn.acquire()


class Block(kernel.BlockManager):
    def run(self, grid_point, *arguments):
        threads = [Thread(lambda: self._f(*arguments), self, grid_point, point, self._debug)
                   for point in np.ndindex(*self._block_dim)]
        for thread in threads:
            thread.start()
        while threads:
            random.shuffle(threads)
            for thread in threads:
                thread.turn.release()
                thread.over.acquire()
                if thread.exception:
                    raise thread.exception[0].with_traceback(thread.exception[1])
            threads = [thread for thread in threads if not thread.ended]


kernel.BlockManager = Block
