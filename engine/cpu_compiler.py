"""The decorators by which numba compiles the CPU engine: `njit` for what Python calls; `inner`, `leaf` and `inlined`
for what only compiled functions call."""

import ctypes
import functools

import llvmlite.binding
import numba
from numba.core import codegen, compiler, config

from engine import kernel_cache

# LLVM prefers registers of 256 bits where it has larger ones. Read when numba compiles its first function.
config.CPU_FEATURES = config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten() + ",-prefer-256-bit"


class Inner(codegen.JITCodeLibrary):
    """A function that is optimized and becomes machine code only within its callers. numba does both for every function
    too: then all kernels of `laptop` take 31 s of one core to compile and not 18 s, and `evaluate` takes half as long
    again."""

    def finalize(self):
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._final_module.verify()
        self._finalize_dynamic_globals()
        self._finalized = True

    # numba asks for these so that Python can call the function; a call raises a TypeError
    codegen = property(lambda self: self)

    def set_env(self, name, environment):
        """Nothing: without machine code there is no environment."""

    def get_pointer_to_function(self, name):
        return ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value


class InnerCompiler(compiler.Compiler):
    """Compiles a function into an `Inner`."""

    def compile_extra(self, function):
        self.state.library = Inner(self.state.targetctx.codegen(), function.__qualname__)
        self.state.library.enable_object_caching()
        return super().compile_extra(function)


def njit(function):
    """Like numba.njit(nogil=True, error_model="numpy"), with a CpuCache."""
    compiled = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    compiled._cache = kernel_cache.CpuCache(function)
    return compiled


inner = functools.partial(numba.njit, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True,
                          pipeline_class=InnerCompiler)
# allocates no array and counts no references, because counting takes longer than a short row
leaf = functools.partial(inner, _nrt=False)
# for what is called once a row
inlined = functools.partial(leaf, forceinline=True)
