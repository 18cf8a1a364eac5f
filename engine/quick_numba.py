"""Compiling by numba-cuda 0.30 in under half of the time, and without a GPU. Its internals are replaced only within the
blocks below."""

import collections
import contextlib
import functools
from types import SimpleNamespace
from unittest import mock

from numba.cuda import core, dispatcher, lowering, utils
from numba.cuda.core import analysis, inline_closurecall, ir, ssa, typed_passes, untyped_passes
from numba.cuda.core.base import BaseContext
from numba.cuda.core.inline_closurecall import InlineWorker
from numba.cuda.core.typeinfer import ConstraintNetwork, TypeVarMap
from numba.cuda.cudadrv import devices
from numba.cuda.target import CUDATypingContext

from engine import kernel_cache

NODES = {kind for kind in vars(ir).values() if isinstance(kind, type)             # what inlining changes
         and issubclass(kind, (ir.Inst, ir.Var, ir.Scope, ir.VarMap, ir.Block, ir.Arg))}
WITHOUT_VARIABLES = {str, int, bool, type(None), ir.Loc}


@contextlib.contextmanager
def without_gpu(capability):
    """A block in which kernels are compiled to machine code for a compute capability, but not loaded."""
    gpu = SimpleNamespace(compute_capability=capability)
    with (mock.patch.object(devices, "get_context", lambda: SimpleNamespace(device=gpu)),
          mock.patch.object(dispatcher, "get_current_device", lambda: gpu),
          mock.patch.object(dispatcher._Kernel, "bind", lambda self: self._codelibrary.get_cubin())):
        yield


@contextlib.contextmanager
def quick_cuda(first_of=lambda function: function):
    """A block in which numba-cuda compiles in under half of the time, to the same PTX. It omits work whose result is
    known or not needed: see each function here, `_found_once` and kernel_cache.quick.

    first_of(function): a device function, or one to inline, that stands for it; the same for all of equal content."""
    inline = InlineWorker.inline_function
    read, functions = InlineWorker.run_untyped_passes, {}
    make_static, rewrite = ssa._run_ssa, ssa._run_block_rewrite
    named = {}
    live = analysis.compute_live_map

    def run_untyped_passes(self, function, enable_ssa=False):
        """Reads a function only once, and copies only what changes."""
        self.flags.enable_ssa = enable_ssa
        function = first_of(function)
        if (function, enable_ssa) not in functions:
            functions[function, enable_ssa] = read(self, function, enable_ssa)
        inlined = functions[function, enable_ssa].copy()
        inlined.blocks = copied(inlined.blocks, {})
        return inlined

    def inline_function(self, *args):
        """Without another deep copy of the function."""
        with mock.patch.object(inline_closurecall, "copy", SimpleNamespace(deepcopy=lambda blocks: blocks)):
            return inline(self, *args)

    def run_ssa(blocks):
        """Finds for `run_block_rewrite` which block names which variables."""
        named.update({label: {v.name for statement in block.body for v in statement.list_vars()}
                      for label, block in blocks.items()})
        return make_static(blocks)

    def run_block_rewrite(blocks, states, handler):
        """Rewrites only the blocks that name the variable that becomes static."""
        return {label: rewrite({label: block}, states, handler)[label] if states["varname"] in named[label] else block
                for label, block in blocks.items()}

    def compute_live_map(flow, blocks, used, defined):
        """Omits variables that one block alone uses."""
        elsewhere = set().union(*used.values())
        return live(flow, blocks, used, {label: names & elsewhere for label, names in defined.items()})

    def find_singly_assigned_variable(self):
        """Searches all blocks once, not one block for every variable."""
        elsewhere = analysis.compute_use_defs(self.blocks).usemap.values()
        assigned = collections.Counter(statement.target.name for block in self.blocks.values()
                                       for statement in block.body if isinstance(statement, ir.assign_types))
        once = {name for name, count in assigned.items() if count == 1}
        self._singly_assigned_vars = once.difference(*elsewhere)
        self._blk_local_varmap = {}

    def rec_list_vars(self, value):
        """Searches for no variables in texts and numbers."""
        if isinstance(value, ir.var_types):
            return [value]
        if isinstance(value, ir.inst_types):
            return value.list_vars()
        found = []
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            if type(one) not in WITHOUT_VARIABLES:
                found += rec_list_vars(self, one)
        return found

    def nothing(self, state):
        """In place of passes for closures, inlined overloads and array expressions."""
        return True

    with (kernel_cache.uncollected(), kernel_cache.quick(core), _found_once(first_of),
          mock.patch.multiple(InlineWorker, run_untyped_passes=run_untyped_passes, inline_function=inline_function),
          mock.patch.object(analysis, "compute_live_map", compute_live_map),
          mock.patch.multiple(ssa, _run_ssa=run_ssa, _run_block_rewrite=run_block_rewrite),
          mock.patch.object(lowering.Lower, "_find_singly_assigned_variable", find_singly_assigned_variable),
          mock.patch.object(ir.Inst, "_rec_list_vars", rec_list_vars),
          mock.patch.object(utils, "pysignature", functools.cache(utils.pysignature)),
          mock.patch.object(lowering.Lower, "_disable_sroa_like_opt", False),
          mock.patch.object(lowering, "new_error_context", lambda *_, **__: contextlib.nullcontext()),
          mock.patch.object(untyped_passes.InlineClosureLikes, "run_pass", nothing),
          mock.patch.object(typed_passes.InlineOverloads, "run_pass", nothing),
          mock.patch.object(typed_passes.NopythonRewrites, "run_pass", nothing)):
        yield


@contextlib.contextmanager
def _found_once(first_of):
    """The part of `quick_cuda` for types and implementations: each is found once."""
    implementation, implementations, missing = BaseContext.get_function, {}, {}
    size, sizes = BaseContext.get_abi_sizeof, {}
    type_of, types_of = CUDATypingContext.resolve_value_type, {}
    infer, variable_of = ConstraintNetwork.propagate, TypeVarMap.__getitem__
    asked = []

    def get_function(self, fn, sig, **first):
        """Chooses an implementation once, also if there is none."""
        call = self, fn, sig
        if call in missing:
            raise NotImplementedError(missing[call])
        if call not in implementations:
            try:
                implementations[call] = implementation(self, fn, sig, **first)
            except NotImplementedError as error:             # numba's word for: look elsewhere
                missing[call] = str(error)
                raise
        return implementations[call]

    def get_abi_sizeof(self, kind):
        if (self, kind) not in sizes:
            sizes[self, kind] = size(self, kind)
        return sizes[self, kind]

    def resolve_value_type(self, value):
        if isinstance(value, dispatcher.CUDADispatcher):
            value = first_of(value)
        if (self, id(value)) not in types_of:
            types_of[self, id(value)] = value, type_of(self, value)
        return types_of[self, id(value)][1]

    def propagate(self, inference):
        """Infers again only from types that have changed since."""
        errors = []
        for constraint in self.constraints:
            before = getattr(constraint, "settled", None)
            if before is None or any(variable.type is not kind for variable, kind in before):
                network = ConstraintNetwork()
                network.append(constraint)
                asked.append([])
                found, variables = infer(network, inference), asked.pop()
                errors += found
                constraint.settled = None if found else [(variable, variable.type) for variable in variables]
        return errors

    def variable_asked_for(self, name):
        found = variable_of(self, name)
        if asked:
            asked[-1].append(found)
        return found

    with (mock.patch.multiple(BaseContext, get_function=get_function, get_abi_sizeof=get_abi_sizeof),
          mock.patch.object(CUDATypingContext, "resolve_value_type", resolve_value_type),
          mock.patch.object(ConstraintNetwork, "propagate", propagate),
          mock.patch.object(TypeVarMap, "__getitem__", variable_asked_for)):
        yield


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
