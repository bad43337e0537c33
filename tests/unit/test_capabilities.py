"""Manifest models: what they accept, what they refuse, and that they survive JSON."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from gdn.capabilities import BackendManifest
from gdn.capabilities import CapabilityRow
from gdn.capabilities import Dims
from gdn.capabilities import SMRange
from gdn.capabilities import manifest_schema
from tests.unit.builders import backend
from tests.unit.builders import cuda
from tests.unit.builders import row
from tests.unit.builders import triple_rows

SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "manifest-v1.schema.json"


def test_json_round_trip_keeps_everything():
    manifest = backend("acme", [*triple_rows(requires="acme-kernels>=1.2"), row("conv_update", conv_widths=[3, 4])])
    assert BackendManifest.model_validate_json(manifest.model_dump_json()) == manifest
    assert hash(manifest) == hash(BackendManifest.model_validate_json(manifest.model_dump_json()))


def test_published_schema_is_the_models_schema():
    assert json.loads(SCHEMA_FILE.read_text()) == json.loads(json.dumps(manifest_schema()))


@pytest.mark.parametrize("written", [90, (90, 90), [90, 90], {"min": 90, "max": 90}])
def test_sm_ranges_read_in_every_spelling(written):
    made = CapabilityRow.model_validate(row(target={"platform": "cuda", "sm_range": written}))
    assert made.target.sm_range == (SMRange(min=90, max=90),)


def test_several_sm_ranges():
    made = CapabilityRow.model_validate(row(target={"platform": "cuda", "sm_range": [(90, 90), (100, 103)]}))
    assert [str(span) for span in made.target.sm_range] == ["90", "100-103"]


@pytest.mark.parametrize(
    ("dims", "inside", "outside"),
    [
        (Dims(), [1, 128], []),
        (Dims.model_validate([64, 128]), [64, 128], [96]),
        (Dims(min=32, max=256, multiple_of=16), [32, 48, 256], [16, 40, 272]),
    ],
)
def test_dims(dims, inside, outside):
    assert all(size in dims for size in inside)
    assert not any(size in dims for size in outside)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": cuda(100, 90)}, "exceeds"),
        ({"target": {"platform": "vulkan"}}, "platform"),
        ({"target": cuda(90, runtime="thirteen")}, "PEP 440"),
        ({"requires": "not a requirement!"}, "PEP 508"),
        ({"packed_decode": True}, "packed_factory"),
        ({"packed_factory": "a:b"}, "packed_decode"),
        ({"op": "extend", "packed_decode": True, "packed_factory": "a:b"}, "op='decode'"),
        ({"tree": True, "tree_factory": "a:b"}, "op='verify'"),
        ({"max_draft_tokens": 4}, "op='verify'"),
        ({"state_checkpoints": True}, "op='extend'"),
        ({"factory": "no_colon"}, "factory"),
        ({"factory": "os.system('x'):y"}, "factory"),
        ({"evidence": "believed"}, "evidence"),
        ({"dtypes": set()}, "never match"),
        ({"dtypes": {"float64"}}, "dtypes"),
        ({"unknown_field": 1}, "unknown_field"),
    ],
)
def test_rows_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        CapabilityRow.model_validate(row(**changes))


@pytest.mark.parametrize("name", ["", "A", "9lives", "has space", "x" * 40])
def test_names_are_restricted(name):
    with pytest.raises(ValidationError, match="name"):
        backend(name, triple_rows())
