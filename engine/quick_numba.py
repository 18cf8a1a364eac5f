"""numba-cuda 0.30 in a third of the time, and without a GPU: its internals, replaced in the blocks below alone."""

import collections
import contextlib
import functools
import gc
from types import SimpleNamespace
from unittest import mock

from numba.core.types.functions import BaseFunction
from numba.cuda import dispatcher, lowering
from numba.cuda.core import (analysis, base, compiler_machinery, inline_closurecall, interpreter, ir, ir_utils,
                             postproc, ssa, transforms, typed_passes, typeinfer, untyped_passes)
from numba.cuda.core.errors import WarningsFixer
from numba.cuda.core.inline_closurecall import InlineWorker
from numba.cuda.cudadrv import devices
from numba.cuda.target import CUDATypingContext

from engine import kernel_cache

NODES = {kind for kind in vars(ir).values() if isinstance(kind, type)             # what inlining a function changes
         and issubclass(kind, (ir.Inst, ir.Var, ir.Scope, ir.VarMap, ir.Block, ir.Arg))}
find_variables, visit = ir.Inst._rec_list_vars, ir_utils.visit_vars_inner
CONSTANT = str, ir.Loc, ir.Const, ir.Global, ir.FreeVar                           # that hold no variable
READ = {}                                                # functions to inline, as numba has read them, by their content


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
    static, the rewriting of blocks that do not name it; a search through its block for every variable; the checks and
    timings around every pass; looking at a lowering's parameters, and for new ones, more than once; and Python's search
    for garbage."""
    collects, resolve = gc.isenabled(), typeinfer.CallConstraint.resolve
    inline, read, known = InlineWorker.inline_function, InlineWorker.run_untyped_passes, {}
    call_type, call_types = BaseFunction.get_call_type, {}
    type_of_constant, constants = CUDATypingContext.resolve_value_type, {}
    make_static, rewrite, named = ssa._run_ssa, ssa._run_block_rewrite, {}
    refresh = functools.cache(base.BaseContext.refresh)

    def run(self, emit_dels=False, extend_lifetimes=False):
        self.func_ir.blocks = transforms.canonicalize_cfg(self.func_ir.blocks)
        self.func_ir.variable_lifetime = postproc.VariableLifetime(self.func_ir.blocks)
        self.func_ir.generator_info = None
        if emit_dels:
            self._insert_var_dels(extend_lifetimes)

    def run_untyped_passes(self, function, enable_ssa=False):
        self.flags.enable_ssa = enable_ssa
        name = kernel_cache.content(function, known), enable_ssa
        if name not in READ:
            READ[name] = read(self, function, enable_ssa)
        inlined = READ[name].copy()
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

    replaced = (
        (postproc.PostProcessor, "run", run),
        (interpreter, "peep_hole_delete_with_exit", lambda func_ir: func_ir),
        (InlineWorker, "run_untyped_passes", run_untyped_passes),
        (InlineWorker, "inline_function", inline_function),
        (ir.Inst, "_rec_list_vars", variables_in),
        (ir_utils, "visit_vars_inner", visit_variables),
        (compiler_machinery.PassManager, "_runPass", run_pass),
        (base, "_has_loc", functools.cache(base._has_loc)),
        (base.BaseContext, "refresh", lambda self: refresh(self)),
        (BaseFunction, "get_call_type", get_call_type),
        (typeinfer.CallConstraint, "resolve", resolve_once),
        (CUDATypingContext, "resolve_value_type", resolve_value_type),
        (typeinfer, "new_error_context", no_context),
        (lowering, "new_error_context", no_context),
        (WarningsFixer, "catch_warnings", no_context),
        (ssa, "_run_ssa", run_ssa),
        (ssa, "_run_block_rewrite", run_block_rewrite),
        (lowering.Lower, "_find_singly_assigned_variable", find_singly_assigned_variable),
        (lowering.Lower, "_disable_sroa_like_opt", False),
        (untyped_passes.InlineClosureLikes, "run_pass", lambda self, state: True),
        (typed_passes.NopythonRewrites, "run_pass", lambda self, state: True))
    gc.disable()
    try:
        with contextlib.ExitStack() as stack:
            for where, name, by in replaced:
                stack.enter_context(mock.patch.object(where, name, by))
            yield
    finally:
        if collects:
            gc.enable()


def variables_in(self, value):
    """The most frequent kinds first."""
    kind = type(value)
    if kind is ir.Var:
        return [value]
    return [] if kind in CONSTANT else find_variables(self, value)


def visit_variables(node, callback, data):
    kind = type(node)
    if kind is ir.Var:
        return callback(node, data)
    return node if kind in CONSTANT else visit(node, callback, data)


def run_pass(self, index, step, state):
    step.analysis = self._analysis
    for part in step.run_initialization, step.run_pass, step.run_finalizer:
        part(state)
    if compiler_machinery._pass_registry.get(type(step)).mutates_CFG:
        postproc.PostProcessor(state.func_ir).run()


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
