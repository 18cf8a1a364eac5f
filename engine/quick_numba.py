"""numba-cuda 0.30 in a third of the time, and without a GPU: its internals, replaced in the blocks below alone."""

import collections
import contextlib
import gc
from types import SimpleNamespace
from unittest import mock

from numba.core.types.functions import BaseFunction
from numba.cuda import dispatcher, lowering
from numba.cuda.core import (analysis, inline_closurecall, ir, postproc, ssa, transforms, typed_passes, typeinfer,
                             untyped_passes)
from numba.cuda.core.errors import WarningsFixer
from numba.cuda.core.inline_closurecall import InlineWorker
from numba.cuda.cudadrv import devices
from numba.cuda.target import CUDATypingContext

NODES = {kind for kind in vars(ir).values() if isinstance(kind, type)             # what inlining a function changes
         and issubclass(kind, (ir.Inst, ir.Var, ir.Scope, ir.VarMap, ir.Block, ir.Arg))}


@contextlib.contextmanager
def without_gpu(capability):
    """A block in which kernels are compiled to machine code for a compute capability, but not loaded."""
    gpu = SimpleNamespace(compute_capability=capability)
    with (mock.patch.object(devices, "get_context", lambda: SimpleNamespace(device=gpu)),
          mock.patch.object(dispatcher, "get_current_device", lambda: gpu),
          mock.patch.object(dispatcher._Kernel, "bind", lambda self: self._codelibrary.get_cubin())):
        yield


@contextlib.contextmanager
def quick():
    """A block in which numba-cuda compiles in a third of the time, to the same PTX. It omits what is not needed here:
    passes for closures and array expressions; after every inlining the search for live variables, which only `del`
    wants; copies of what does not change; reading a function again to inline it again; the choice of a signature for
    every single call, and of a type for every use of a constant; the context of error messages; to make a variable
    static, the rewriting of blocks that do not name it; a search through its block for every variable; and Python's
    search for garbage."""
    collects, resolve = gc.isenabled(), typeinfer.CallConstraint.resolve
    inline, read, functions = InlineWorker.inline_function, InlineWorker.run_untyped_passes, {}
    call_type, call_types = BaseFunction.get_call_type, {}
    type_of_constant, constants = CUDATypingContext.resolve_value_type, {}
    make_static, rewrite, named = ssa._run_ssa, ssa._run_block_rewrite, {}

    def run(self, emit_dels=False, extend_lifetimes=False):
        self.func_ir.blocks = transforms.canonicalize_cfg(self.func_ir.blocks)
        self.func_ir.variable_lifetime = postproc.VariableLifetime(self.func_ir.blocks)
        self.func_ir.generator_info = None
        if emit_dels:
            self._insert_var_dels(extend_lifetimes)

    def run_untyped_passes(self, function, enable_ssa=False):
        self.flags.enable_ssa = enable_ssa
        if (function, enable_ssa) not in functions:
            functions[function, enable_ssa] = read(self, function, enable_ssa)
        inlined = functions[function, enable_ssa].copy()
        inlined.blocks = copied(inlined.blocks, {})
        return inlined

    def inline_function(self, *args):
        with mock.patch.object(inline_closurecall, "copy", SimpleNamespace(deepcopy=lambda blocks: blocks)):
            return inline(self, *args)

    def get_call_type(self, context, args, kws):
        call = self, args, tuple(kws.items())
        if call not in call_types:
            call_types[call] = call_type(self, context, args, kws)
        return call_types[call]

    def resolve_value_type(self, value):
        if id(value) not in constants:
            constants[id(value)] = value, type_of_constant(self, value)
        return constants[id(value)][1]

    def no_context(*_, **__):
        return contextlib.nullcontext()

    def resolve_once(self, inferer, variables, fnty):
        def known():
            return fnty, [variables[v].type for v in names]
        names = [self.target, *(v.name for v in (*self.args, *dict(self.kws).values(), self.vararg) if v)]
        if getattr(self, "known", None) != known():
            resolve(self, inferer, variables, fnty)
            self.known = known()

    def run_ssa(blocks):
        named.update({label: {v.name for statement in block.body for v in statement.list_vars()}
                      for label, block in blocks.items()})
        return make_static(blocks)

    def run_block_rewrite(blocks, states, handler):
        return {label: rewrite({label: block}, states, handler)[label] if states["varname"] in named[label] else block
                for label, block in blocks.items()}

    def find_singly_assigned_variable(self):
        elsewhere = analysis.compute_use_defs(self.blocks).usemap.values()
        assigned = collections.Counter(statement.target.name for block in self.blocks.values()
                                       for statement in block.body if isinstance(statement, ir.assign_types))
        once = {name for name, count in assigned.items() if count == 1}
        self._singly_assigned_vars = once.difference(*elsewhere)
        self._blk_local_varmap = {}

    gc.disable()
    try:
        with (mock.patch.object(postproc.PostProcessor, "run", run),
              mock.patch.object(InlineWorker, "run_untyped_passes", run_untyped_passes),
              mock.patch.object(InlineWorker, "inline_function", inline_function),
              mock.patch.object(BaseFunction, "get_call_type", get_call_type),
              mock.patch.object(typeinfer.CallConstraint, "resolve", resolve_once),
              mock.patch.object(CUDATypingContext, "resolve_value_type", resolve_value_type),
              mock.patch.object(typeinfer, "new_error_context", no_context),
              mock.patch.object(lowering, "new_error_context", no_context),
              mock.patch.object(WarningsFixer, "catch_warnings", no_context),
              mock.patch.object(ssa, "_run_ssa", run_ssa),
              mock.patch.object(ssa, "_run_block_rewrite", run_block_rewrite),
              mock.patch.object(lowering.Lower, "_find_singly_assigned_variable", find_singly_assigned_variable),
              mock.patch.object(untyped_passes.InlineClosureLikes, "run_pass", lambda self, state: True),
              mock.patch.object(typed_passes.NopythonRewrites, "run_pass", lambda self, state: True)):
            yield
    finally:
        if collects:
            gc.enable()


def copied(value, memo):
    """Blocks of numba's representation, copied like copy.deepcopy does it, but sharing all that never changes."""
    kind = type(value)
    if kind in (str, ir.Loc):
        return value
    if kind in NODES:
        if id(value) not in memo:
            memo[id(value)] = new = object.__new__(kind)
            fields = vars(new)
            for name, field in vars(value).items():
                fields[name] = copied(field, memo)
        return memo[id(value)]
    if kind in (list, tuple):
        return kind([copied(one, memo) for one in value])
    if isinstance(value, (dict, set)):
        new = value.copy()
        for key in new if isinstance(value, dict) else ():
            new[key] = copied(new[key], memo)
        return new
    return value
