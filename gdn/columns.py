"""A manifest's columns as an operator reads them, for every output format alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gdn.capabilities import BackendManifest
from gdn.capabilities import CapabilityRow
from gdn.capabilities import CpuTarget
from gdn.capabilities import CudaTarget
from gdn.capabilities import NpuTarget
from gdn.capabilities import RocmTarget
from gdn.registry import BackendStatus
from gdn.report import ResolutionReport
from gdn.types import OPERATIONS

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def manifest_columns(manifest: BackendManifest) -> dict[str, str]:
    """The summary of all rows: targets, head dims, dtypes, packed decode, verify, replay, evidence."""
    rows = manifest.capabilities
    decode, verify = manifest.rows("decode"), manifest.rows("verify")
    return {
        "targets": _join(target_text(row) for row in rows),
        "head_dims": _join(f"K {row.head_dims.k} V {row.head_dims.v}" for row in rows),
        "dtypes": _dtypes(dtype for row in rows for dtype in row.dtypes),
        "state_dtypes": _dtypes(
            dtype for row in (*decode, *verify, *manifest.rows("extend")) for dtype in row.state_dtypes
        ),
        "packed_decode": "yes" if any(row.packed_decode for row in decode) else "no",
        "replay": "yes" if any(row.replay for row in decode) else "no",
        "verify": _join(verify_text(row) for row in verify) or "no",
        "maturity": _join(manifest.maturity_of(row) for row in rows) or manifest.maturity,
        "requires": _join(text for row in rows for text in row.requires),
        "evidence": _join(text for row in rows for text in row.evidence),
    }


def target_text(row: CapabilityRow) -> str:
    """Where a row runs, in words."""
    match row.target:
        case CudaTarget(sm_range=ranges, runtime=runtime):
            return f"SM {','.join(map(str, ranges))}" + (f" CUDA {runtime}" if runtime else "")
        case RocmTarget(gfx=gfx):
            return ",".join(gfx) or "any gfx"
        case NpuTarget(soc=soc):
            return ",".join(soc) or "any ascend"
        case CpuTarget(features=features):
            return "CPU" + (f" with {','.join(features)}" if features else "")
    raise AssertionError(f"unknown target {row.target!r}")


def verify_text(row: CapabilityRow) -> str:
    """Drafts that a verify row takes, in words."""
    drafts = "any T" if row.max_draft_tokens is None else f"T<={row.max_draft_tokens}"
    return f"{drafts}, tree" if row.tree else drafts


def backend_dict(status: BackendStatus, report: ResolutionReport) -> dict[str, Any]:
    """One backend for JSON: its plugin, its manifest, and what it serves of `report`'s question."""
    served = {op: report.chosen[op] == status.name for op in OPERATIONS}
    return {
        **status.to_dict(),
        "columns": manifest_columns(status.manifest) if status.manifest else None,
        "operations": {
            op: {
                "chosen": served[op],
                "reasons": [{"code": r.code, "message": r.message} for r in report.reasons(op, status.name)],
            }
            for op in OPERATIONS
        },
    }


def _join(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _dtypes(names: Iterable[str]) -> str:
    present = set(names)
    return ",".join(short for name, short in _SHORT.items() if name in present)
