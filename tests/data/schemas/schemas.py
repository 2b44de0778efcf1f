"""Validates values against JSON schemas with the Python package jsonschema, and writes schemas.json.

  pip install jsonschema==4.26.0
  python3 schemas.py

Each entry has a schema, valid values and invalid values. Patterns have the same meaning in Python's `re` and in ECMA-262.
`formats` has the schemas of pydantic's types that have a format, as pydantic 2.14 writes them.
"""

import itertools
import json
import pathlib
import random

import jsonschema

HERE = pathlib.Path(__file__).parent
STR, INT, BOOL = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def obj(**members):
    return {"type": "object", **members}


# Patterns that match declared names in each way that could leave llguidance without a valid token.
NAMES = [
    obj(properties={"a": INT}, patternProperties={"^a$": {"minimum": 3}}),
    obj(properties={"a": INT, "b": STR}, patternProperties={"^(a|b)$": {}}, additionalProperties=False),
    obj(properties={"a": INT}, patternProperties={"^a": INT}),
    obj(properties={"a": INT, "ab": BOOL}, patternProperties={"^ab?$": {}}),
    obj(properties={"x-a": STR}, patternProperties={"^x-": STR}, additionalProperties=INT),
    obj(properties={"a": STR}, patternProperties={"^a$": INT}),
    obj(properties={"a": INT, "b": BOOL}, patternProperties={"": {"type": ["integer", "boolean"]}}),
    obj(properties={"a": INT}, patternProperties={".*": {}}, additionalProperties=BOOL),
    obj(properties={"": INT}, patternProperties={"^[\\s\\S]+$": INT}),
    obj(patternProperties={"^[a-c]$": INT}, required=["a", "b"], additionalProperties=False),
    obj(patternProperties={"^a$": INT}, required=["a"]),
    obj(properties={"a": INT, "b": INT, "c": INT}, patternProperties={"^[abc]$": {"maximum": 5}}, required=["b"], additionalProperties=False),
    obj(properties={"n": obj(properties={"a": INT}, patternProperties={"^a$": {}}, additionalProperties=False)}, required=["n"]),
    {"allOf": [obj(properties={"a": INT}), obj(patternProperties={"^a$": {"minimum": 1}})]},
    {"allOf": [obj(properties={"a": INT}, required=["a"]), obj(patternProperties={"^a$": {"maximum": 9}}, additionalProperties=False)]},
    {"$defs": {"p": obj(patternProperties={"^(a|b)$": INT})}, "allOf": [{"$ref": "#/$defs/p"}, obj(properties={"a": {}, "b": {}}, required=["a"])]},
    obj(properties={"a": INT, "b": INT}, patternProperties={"^a$": {"minimum": 1}, "^b$": {"minimum": 2}}, additionalProperties=False),
    obj(patternProperties={"^a$": INT, "^[a-z]$": {"minimum": 1}}),
    obj(patternProperties={"^id$": STR, "^[a-z]+$": {"maxLength": 3}}, additionalProperties=False),
    obj(properties={"a": False}, patternProperties={"^a$": {}, "^b": INT}),
    obj(properties={"a": INT}, patternProperties={"^b$": False}, additionalProperties=BOOL),
    obj(properties={"a": INT, "é": STR, 'q"': STR}, patternProperties={"^(é|q\")$": {"maxLength": 2}}, required=["é", 'q"'], additionalProperties=False),
    obj(properties={"a": INT}, patternProperties={"^[^a]": BOOL}, additionalProperties=False),
    obj(properties={"a": INT}, patternProperties={"^a$|^b": {}, "^c": BOOL}),
    obj(properties={"a\\": INT}, patternProperties={"\\\\$": INT}, additionalProperties=False),
    {"anyOf": [obj(properties={"a": INT}, patternProperties={"^a$": {}}, additionalProperties=False), obj(patternProperties={"^b$": INT}, required=["b"])]},
    obj(properties={"a": INT, "b": INT}, patternProperties={"^.$": {"maximum": 7}}, additionalProperties=False),
    obj(patternProperties={"^a?$": INT}, required=[""], additionalProperties=False),
]
KEYS = ["a", "b", "c", "d", "ab", "abc", "bc", "x-a", "x-", "id", "", "é", 'q"', "a\\", "z"]
VALUES = [0, 1, 4, 8, True, "x", "long one", None]

PATTERNS = [
    {"type": "string", "pattern": "^[^&&<>]*$"},
    {"type": "string", "pattern": "[[]"},
    {"type": "string", "pattern": "^[^\"]*$"},
    {"type": "string", "pattern": "^[^\\\\]*$"},
    {"type": "string", "pattern": "^[^a]*$"},
    {"type": "string", "pattern": "^[^\"\\\\]*$"},
    {"type": "string", "pattern": "\"", "maxLength": 3},
    {"type": "string", "pattern": "^a", "minLength": 2},
    {"allOf": [{"type": "string", "pattern": "[0-9]"}, {"pattern": "[a-z]"}]},
    {"anyOf": [{"type": "string", "pattern": "^[^\"]+$"}, {"type": "string", "pattern": "^[^x]+$"}]},
    {"type": ["string", "integer"], "pattern": "^[a-z]+$"},
    {"type": "integer", "pattern": "("},
    {"type": "object", "properties": {"pattern": {"const": "("}, "format": {"enum": ["x"]}}, "required": ["pattern", "format"], "additionalProperties": False},
]
TEXTS = ["", "a", "ab", "a1", "1a", "x", '"', 'a"b', "\\", "a\\", '"\\', "[", "&", "<script>&", "\n", "\t", "é", "aaaa", 'aaa"', 3, None,
         {"pattern": "(", "format": "x"}, {"pattern": "(", "format": "y"}, {"pattern": "x", "format": "x"}]

FORMATS = """uuid1 uuid3 uuid4 uuid5 uuid6 uuid7 uuid8 uuid password path file-path directory-path uri multi-host-uri ipv4 ipv4network
ipv4interface ipv6 ipv6network ipv6interface ipvanyaddress ipvanyinterface ipvanynetwork base64 base64url binary regex date date-time time
duration json-string color phone name-email email int32 int64 float double byte uint16 currency country frob""".split()


def judged(schema, values):
    validator = jsonschema.Draft202012Validator(schema)
    valid, invalid = [], []
    for value in values:
        (valid if validator.is_valid(value) else invalid).append(value)
    return {"schema": schema, "valid": valid, "invalid": invalid}


def objects(draw):
    singles = [{key: value} for key in KEYS for value in VALUES]
    pairs = [dict(zip(keys, draw.choices(VALUES, k=2))) for keys in itertools.combinations(KEYS, 2)]
    return [{}] + singles + pairs


def few(entry, draw, count):
    for kind in ("valid", "invalid"):
        entry[kind] = draw.sample(entry[kind], min(count, len(entry[kind])))
    return entry


def main():
    draw = random.Random(3)
    names = [few(judged(schema, objects(draw)), draw, 25) for schema in NAMES]
    patterns = [judged(schema, TEXTS) for schema in PATTERNS]
    lines = lambda entries: ",\n".join(json.dumps(entry) for entry in entries)
    text = f'{{"names": [\n{lines(names)}\n],\n"patterns": [\n{lines(patterns)}\n],\n"formats": {json.dumps(FORMATS)}}}\n'
    (HERE / "schemas.json").write_text(text)


if __name__ == "__main__":
    main()
