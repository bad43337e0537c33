"""The operations inside `torch.compile`: one operator each, right schemas and fakes, results as in eager mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gdn
from gdn.testing.calls import WRITTEN
from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.refusals import broken_calls
from gdn.torch_ops.plans import register
from gdn.torch_ops.registration import _names
from gdn.torch_ops.schemas import SCHEMAS
from gdn.types import OPERATIONS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLAIN = Case(lengths=(1, 1, 1), drafts=4)
DRAFTS = PLAIN.but(lengths=(4, 1, 3))
PROMPTS = PLAIN.but(lengths=(70, 0, 5))
CASES = {
    "decode": [PLAIN.but("out", out=True, scale=0.3), PLAIN.but("offsets", offsets=True, lengths=(1, 0, 1), tail=1)],
    "packed_decode": [PLAIN.but("out", out=True, scale=0.3)],
    "replay_decode": [PLAIN.but("forced", forced=(0, 1, 0), cursors=(1, 2, 3))],
    "extend": [
        PROMPTS,
        PROMPTS.but("checkpoints", chunk_states=True, host_lengths=True, snapshots=(1, -1, 0)),
        PROMPTS.but("out", out=True, scale=0.3, tail=2),
    ],
    "verify": [DRAFTS, DRAFTS.but("unbuffered", buffer=False, out=True)],
    "tree_verify": [DRAFTS],
    "conv_extend": [PROMPTS, PROMPTS.but("fresh", history="mixed", host_lengths=True, bias=False, act=None)],
    "conv_update": [
        PLAIN.but("single", drafts=1, buffer=False),
        PLAIN.but("chain"),
        PLAIN.but("tree", tree=True),
    ],
    "gating": [PROMPTS],
    "qkv_split": [PROMPTS],
}  # fmt: skip
EVERYWHERE = (
    PLAIN.but("plain"),
    PLAIN.but("padded", slots=(2, -1, 0)),
    PLAIN.but("views", views=True, slot_gap=24, index="int64"),
    PLAIN.but("one-request", lengths=(1,)),
)
POINTS = [
    pytest.param(operation, case, id=f"{operation}-{case.name}")
    for operation in OPERATIONS
    for case in (*EVERYWHERE, *CASES[operation])
]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch._dynamo.reset()
    return request.param


def triple_for(case, device):
    return gdn.resolve(case.config(max_draft_tokens=case.drafts, state_checkpoints=True), device=device)


def clean_call(operation, case, device, seed=0):
    """A call without NaN: opcheck compares what it wrote with `==`."""
    call = build_call(operation, case, seed=seed, device=device)
    for value in call.arguments.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            size = value.untyped_storage().nbytes() // value.element_size()
            value.as_strided((size,), (1,), 0).nan_to_num_(0.25)
    return call


def operator_arguments(operation, call, triple):
    """The call as its operator takes it, with an `out` where the operator needs one."""
    arguments = dict(call.arguments)
    if operation not in ("conv_extend", "conv_update", "gating", "qkv_split") and arguments.get("out") is None:
        result = triple.operations()[operation](**call.copy().arguments)
        arguments["out"] = torch.zeros_like(result.output if operation == "extend" else result)
    if operation == "qkv_split":
        heads = call.case.heads
        arguments |= {"key_heads": heads.HK, "value_heads": heads.HV, "key_dim": heads.K, "value_dim": heads.V}
    defaults = {"return_chunk_states": False, "activation": "silu"}
    plan = register(f"{triple.key}@{triple.device.torch_device}", triple.operations())
    return (plan, *(arguments.get(name, defaults.get(name)) for name in _names(operation)))


def run_both(compiled, call):
    """The results and the calls after them, eager and compiled."""
    eager, traced = call.copy(), call.copy()
    function, graph = compiled
    return (tensors(function(**eager.arguments)), eager), (tensors(graph(**traced.arguments)), traced)


def tensors(result):
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if part is not None]


def assert_same(one, other):
    (expected, eager), (got, traced) = one, other
    assert len(got) == len(expected)
    for mine, right in zip(got, expected, strict=True):
        assert torch.equal(mine, right)
        assert mine.stride() == right.stride()
    for name in WRITTEN & eager.arguments.keys():
        if eager.arguments[name] is not None:
            assert torch.equal(bits(traced.arguments[name]), bits(eager.arguments[name])), name


def bits(x):
    """All memory of a tensor, gaps included."""
    return torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).nan_to_num(7e7)


class Graphs:
    """A backend that keeps the graphs that it gets."""

    def __init__(self, backend="aot_eager"):
        self.kept = []
        self.compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs):
        self.kept.append(graph)
        return self.compile(graph, inputs)

    def operators(self):
        return [str(node.target) for graph in self.kept for node in graph.graph.nodes if "gdn" in str(node.target)]


@pytest.mark.parametrize(("operation", "case"), POINTS)
def test_one_operator_and_the_results_of_eager_mode(operation, case, device):
    triple = triple_for(case, device)
    graphs = Graphs()
    graph = torch.compile(triple.compilable().operations()[operation], fullgraph=True, backend=graphs)
    call = clean_call(operation, case, device)
    assert_same(*run_both((triple.operations()[operation], graph), call))
    assert graphs.operators() == [f"gdn.{operation}"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("operation", OPERATIONS)
def test_through_inductor(operation, device):
    case = CASES[operation][-1]
    triple = triple_for(case, device)
    function = triple.compilable().operations()[operation]
    names = [name for name in clean_call(operation, case, device).arguments if name in ("q", "mixed_qkv", "x", "a")]

    def layer(**arguments):
        """With work before and after, so that the compiler may fuse, reuse and reorder."""
        arguments[names[0]] = arguments[names[0]] * 2 + 1
        return [part.float() * 3 for part in tensors(function(**arguments))]

    def as_result(**arguments):
        return tuple(layer(**arguments))

    graph = torch.compile(as_result, fullgraph=True)
    assert_same(*run_both((as_result, graph), clean_call(operation, case, device)))


@pytest.mark.parametrize(("operation", "case"), [point for point in POINTS if point.values[1].name != "one-request"])
def test_case_80_opcheck(operation, case, device):
    triple = triple_for(case, device)
    triple.compilable()
    arguments = operator_arguments(operation, clean_call(operation, case, device), triple)
    torch.library.opcheck(getattr(torch.ops.gdn, operation).default, arguments)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_case_80_fakes_refuse_what_the_operation_refuses(operation, device):
    case = CASES[operation][0]
    triple = triple_for(case, device)
    triple.compilable()
    operator, names = getattr(torch.ops.gdn, operation), _names(operation)
    call = clean_call(operation, case, device)
    plan, *good = operator_arguments(operation, call, triple)
    refused = set()
    broken_ones = list(broken_calls(call))
    with FakeTensorMode(allow_non_fake_inputs=True):
        operator(plan, *good)
        for name, broken in broken_ones:
            if isinstance(broken.arguments[name], list):  # the schema refuses what is no tensor
                continue
            arguments = [broken.arguments.get(n, right) for n, right in zip(names, good, strict=True)]
            with pytest.raises(gdn.InputError, match=name):
                operator(plan, *arguments)
            refused.add(name)
    tensors_given = {name for name, value in call.arguments.items() if isinstance(value, torch.Tensor)}
    assert refused >= tensors_given


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_graph_serves_every_batch(operation, device):
    case = CASES[operation][-1].but(out=False, tail=0, host_lengths=False, chunk_states=False, offsets=False)
    triple = triple_for(case, device)
    function = triple.operations()[operation]
    graph = torch.compile(
        triple.compilable().operations()[operation], fullgraph=True, backend="aot_eager", dynamic=True
    )
    for seed, batch in enumerate((11, 19, 6, 23)):  # 11 equals no other size: equal ones are taken to stay equal
        lengths = (4,) * batch if operation in ("verify", "tree_verify") else tuple(range(2, 2 + batch))
        wider = case.but(lengths=lengths, pool_slots=29, cursors=None, forced=None, snapshots=None)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            assert_same(*run_both((function, graph), clean_call(operation, wider, device, seed)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("operation", [op for op in OPERATIONS if "(x!)" in SCHEMAS[op]])
def test_case_80_reads_and_writes_keep_their_order(operation, backend, device):
    """Call, read what was written, call, read again."""
    case = CASES[operation][0]
    triple = triple_for(case, device)
    call = clean_call(operation, case, device)
    written = sorted(WRITTEN & call.arguments.keys() - {"out"})

    def program(function):
        def run(**arguments):
            read = []
            for _ in range(2):
                read += tensors(function(**arguments))
                read += [arguments[name] * 2 for name in written]
            return tuple(part.clone() for part in read)

        return run

    eager = program(triple.operations()[operation])
    graph = torch.compile(program(triple.compilable().operations()[operation]), fullgraph=True, backend=backend)
    assert_same(*run_both((eager, graph), call))


def test_chunk_states_whose_number_the_device_knows(device):
    case = PROMPTS.but("checkpoints", chunk_states=True)
    triple = triple_for(case, device)
    function = triple.compilable().extend

    def sums(**arguments):
        return (function(**arguments).chunk_states.sum(dim=(2, 3, 4)),)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = torch.compile(sums, fullgraph=True, backend="aot_eager")
        assert_same(*run_both((sums, graph), clean_call("extend", case, device)))


def test_a_module_with_a_triple_and_a_pool_compiles_whole(device):
    case = PLAIN.but("module")
    config = case.config()
    triple = gdn.resolve(config, device=device).compilable()

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.triple = triple
            self.weight = torch.nn.Parameter(torch.randn(config.conv_dim, 4, device=device), requires_grad=False)

        def forward(self, x, a, b, A_log, dt_bias, slots, conv_states, states):
            mixed = self.triple.conv_update(x, conv_states, self.weight, conv_state_indices=slots)
            gates = {"A_log": A_log, "dt_bias": dt_bias}
            out = self.triple.packed_decode(mixed, a, b, **gates, ssm_states=states, cache_indices=slots)
            return out.flatten(2).relu()

    layer = Layer()
    HV, rows, slots = config.num_v_heads, 3, torch.tensor([2, -1, 0], device=device)
    torch.manual_seed(0)
    inputs = [torch.randn(rows, n, device=device) for n in (config.conv_dim, HV, HV)]
    inputs += [torch.randn(HV, device=device) for _ in range(2)]
    pools = [torch.randn(4, config.conv_dim, 3, device=device)]
    pools += [torch.randn(4, HV, config.head_v_dim, config.head_k_dim, device=device)]
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    copies = [pool.clone() for pool in pools]
    for _ in range(3):
        assert torch.equal(compiled(*inputs, slots, *pools), layer(*inputs, slots, *copies))
    assert all(map(torch.equal, pools, copies))
    assert graphs.operators() == ["gdn.conv_update", "gdn.packed_decode"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiler_copies_no_pool(device):
    triple = triple_for(PLAIN, device)
    seen = []

    def decode(*args, **options):
        seen.append(options["ssm_states"].data_ptr() if "ssm_states" in options else None)
        return triple.decode(*args, **options)

    graph = torch.compile(lambda **call: function(**call) * 2, fullgraph=True)
    function = replace(triple, decode=decode).compilable().decode
    call = clean_call("decode", PLAIN, device)
    graph(**call.arguments)
    assert seen == [call.arguments["ssm_states"].data_ptr()]


class _Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_eager_calls_bypass_the_operators(operation, device):
    case = CASES[operation][0]
    triple = triple_for(case, device)
    functions = (triple.operations()[operation], triple.compilable().operations()[operation])
    with _Operators() as ran:
        both = run_both(functions, clean_call(operation, case, device))
    assert_same(*both)
    assert ran.names
    assert not [name for name in ran.names if name.startswith("gdn")]


def test_results_are_never_views_of_what_went_in():
    """A backend whose split of one token returns views, and whose gates come out transposed."""
    config = PLAIN.config()
    triple = gdn.resolve(config, device="cpu")
    HK, HV, K, V = PLAIN.heads

    def views(mixed_qkv):
        q, k, v = mixed_qkv.split((HK * K, HK * K, HV * V), dim=1)
        return q.view(1, 1, HK, K), k.view(1, 1, HK, K), v.view(1, 1, HV, V)

    def transposed(A_log, a, b, dt_bias):
        return tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in triple.gating(A_log, a, b, dt_bias))

    def upside_down(x, *args, **options):
        result = triple.conv_update(x, *args, **options)
        return result.t().contiguous().t()

    strange = replace(triple, qkv_split=views, gating=transposed, conv_update=upside_down)
    for operation in ("qkv_split", "gating", "conv_update"):
        case = PLAIN.but(lengths=(1,)) if operation == "qkv_split" else CASES[operation][0]
        call = clean_call(operation, case, "cpu")
        plan = register("strange", strange.operations())
        arguments = (plan, *operator_arguments(operation, call, triple)[1:])
        torch.library.opcheck(getattr(torch.ops.gdn, operation).default, arguments)


def test_other_functions_under_the_same_key_get_another_plan():
    first, second = {"decode": len}, {"decode": max}
    plans = [register("a-key", functions) for functions in (first, second, first, dict(second))]
    assert plans == ["a-key", "a-key#1", "a-key", "a-key#1"]


def test_a_graph_without_its_triple_says_what_to_do():
    triple = gdn.resolve(PLAIN.config(), device="cpu")
    triple.compilable()
    arguments = operator_arguments("gating", clean_call("gating", PROMPTS, "cpu"), triple)
    with pytest.raises(gdn.GdnError, match=r"no gating of plan 'gone' .*compilable\(\) before"):
        torch.ops.gdn.gating("gone", *arguments[1:])
