"""One rank: plays every scenario in order and prints what it got as JSON. `python worker.py RANK WORLD RENDEZVOUS`.

All scenarios share one process group, so one that ends in an error shows that the group is still in step after it.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from torch import distributed

import gdn
from gdn import registry
from gdn.registry import BackendStatus
from tests.unit.builders import backend
from tests.unit.builders import cuda
from tests.unit.builders import row

RANK = int(sys.argv[1]) if __name__ == "__main__" else 0
CONFIG = gdn.GdnConfig(num_k_heads=2, num_v_heads=4, head_k_dim=64, head_v_dim=128, state_dtype="auto")
CPU = {"platform": "cpu"}
CORE = ("decode", "extend", "verify")


def build(context):
    return lambda: (context.operation, context.state.alignment)


def build_but_not_on_2(context):
    if RANK == 2:
        raise gdn.BackendRefused("no compiler on this host")
    return build(context)


def crash_on_1(context):
    if RANK == 1:
        raise OSError("libfast.so: undefined symbol: go")
    return build(context)


def rows(factory="build", ops=CORE, **changes):
    options = {"target": CPU, "cuda_graph": False, **changes}
    return [row(op, factory=f"__main__:{factory}", **options) for op in ops]


def use(*manifests, version="1"):
    """Replace this rank's backends."""
    fake = registry.Registry()
    fake._manifests = manifests
    fake._statuses = tuple(
        BackendStatus(m.name, True, m.name, f"gdn-{m.name}", version, None, True, m) for m in manifests
    )
    fake.generation = next(registry._generations)
    registry._registry = fake


def fast_and_slow(fast="build", **fast_changes):
    use(backend("fast", rows(fast, **fast_changes), tier="preferred"), backend("slow", rows()))


def resolve(config=CONFIG, group=None, **options):
    options.setdefault("device", "cpu")
    return described(gdn.distributed.resolve(config, group, **options))


def described(triple):
    return {
        "chosen": dict(triple.report.chosen),
        "called": triple.decode(),
        "key": triple.key,
        "state": [triple.state.dtype, triple.state.alignment, triple.state.reserved_slots],
        "rejected": [list(r) for r in triple.report.rejected],
        "fallbacks": [list(f) for f in triple.report.fallbacks],
        "notes": list(triple.report.notes),
    }


def builtin_backends():
    registry.clear_registry()
    triple = gdn.distributed.resolve(CONFIG, device="cpu")
    return {"chosen": dict(triple.report.chosen), "key": triple.key, "function": triple.decode.__module__}


def disabled_on_1():
    fast_and_slow()
    if RANK == 1:
        os.environ["GDN_DISABLE_BACKENDS"] = "fast"
    return resolve()


def refused_on_2():
    fast_and_slow("build_but_not_on_2")
    return resolve()


def crashing_on_1():
    fast_and_slow("crash_on_1")
    return resolve()


def not_installed_on_0():
    fast_and_slow()
    if RANK == 0:
        use(backend("slow", rows()))
    return resolve()


def no_packed_decode_on_1():
    packed = {} if RANK == 1 else {"packed_decode": True, "packed_factory": "__main__:build"}
    use(backend("one", [*rows(ops=("decode",), **packed), *rows(ops=("extend", "verify"))]))
    return resolve()


def only_bfloat16_on_2():
    states = {"state_dtypes": {"bfloat16"}} if RANK == 2 else {}
    use(backend("one", [*rows(ops=("decode", "verify")), *rows(ops=("extend",), **states)]))
    return resolve()


def strictest_contract():
    use(backend("one", rows(state_alignment=2 ** (4 + RANK), reserved_slots=3 - RANK)))
    return resolve()


def versions():
    use(backend("one", rows()), version="2" if RANK == 1 else "1")
    return resolve()


def preference_of_0():
    use(backend("one", rows()), backend("two", rows()))
    return resolve(prefer="two" if RANK == 0 else "one")


def unmet_preference():
    fast_and_slow()
    if RANK == 1:
        os.environ["GDN_DISABLE_BACKENDS"] = "fast"
    return resolve(prefer="fast")


def required_by_2():
    fast_and_slow()
    if RANK == 2:
        os.environ["GDN_BACKEND"] = "slow"
    return resolve()


def requirement_unmet():
    fast_and_slow()
    if RANK == 0:
        os.environ["GDN_DISABLE_BACKENDS"] = "slow"
    return resolve(require="slow" if RANK == 2 else None)


def nobody():
    fast_and_slow()
    os.environ["GDN_DISABLE_BACKENDS"] = ("fast", "slow", "")[RANK]
    return resolve()


def unknown_name_on_1():
    fast_and_slow()
    return resolve(exclude="fastt" if RANK == 1 else ())


def configs_differ():
    fast_and_slow()
    return resolve(CONFIG.model_copy(update={"num_v_heads": 8}) if RANK == 2 else CONFIG)


def hypothetical_device_on_1():
    fast_and_slow()
    return resolve(device=gdn.DeviceInfo.parse("sm90") if RANK == 1 else "cpu")


def mixed_gpus():
    use(backend("hopper", rows(target=cuda(90)), tier="preferred"), backend("any", rows(target=cuda(80, 121))))
    device = gdn.DeviceInfo.parse(("sm90", "sm120", "sm120")[RANK])
    report = gdn.distributed.explain(CONFIG, device=device)
    return {"chosen": dict(report.chosen), "key": report.key, "rejected": [list(r) for r in report.rejected]}


def incomplete_explanation():
    use(backend("hopper", rows(target=cuda(90))))
    report = gdn.distributed.explain(CONFIG, device=gdn.DeviceInfo.parse("sm90" if RANK else "sm80"))
    return {"chosen": dict(report.chosen), "state": report.state, "rejected": [list(r) for r in report.rejected]}


def subgroup():
    fast_and_slow()
    if RANK == 2:
        os.environ["GDN_DISABLE_BACKENDS"] = "fast"
    group = distributed.new_group([1, 2])
    return resolve(group=group)


SCENARIOS = (
    builtin_backends, disabled_on_1, refused_on_2, crashing_on_1, not_installed_on_0, no_packed_decode_on_1,
    only_bfloat16_on_2, strictest_contract, versions, preference_of_0, unmet_preference, required_by_2,
    requirement_unmet, nobody, unknown_name_on_1, configs_differ, hypothetical_device_on_1, mixed_gpus,
    incomplete_explanation, subgroup,
)  # fmt: skip


def play(scenario):
    """What the scenario returned or raised, and what was logged."""
    for name in [name for name in os.environ if name.startswith("GDN_")]:
        del os.environ[name]
    gdn.clear_cache()
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append([record.levelname, record.getMessage()])
    logger = logging.getLogger("gdn.resolver")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        return {"result": scenario(), "log": records}
    except gdn.GdnError as error:
        return {"error": type(error).__name__, "text": str(error), "log": records}
    finally:
        logger.removeHandler(handler)


def main():
    _, rank, world, rendezvous = sys.argv
    distributed.init_process_group("gloo", init_method=rendezvous, rank=int(rank), world_size=int(world))
    print(json.dumps({scenario.__name__: play(scenario) for scenario in SCENARIOS}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
