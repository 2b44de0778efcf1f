"""The structs of ctypes, compared with the description of the C API."""

import ctypes
import json
import unittest

from support import ROOT

import pagedllm

ABI = json.loads((ROOT / "bindings" / "abi.json").read_text(encoding="utf-8"))


class Layout(unittest.TestCase):
    def test_structs_have_the_sizes_and_offsets_of_c(self):
        structs = [struct for struct in ABI["structs"] if not struct.get("opaque")]
        self.assertGreater(len(structs), 10)
        for struct in structs:
            name = "_" + "".join(word.capitalize() for word in struct["name"].split("_")[1:])
            mirror = getattr(pagedllm, name)
            self.assertEqual(ctypes.sizeof(mirror), struct["size"], name)
            for field in struct["fields"]:
                offset = getattr(mirror, field["name"]).offset
                self.assertEqual(offset, field["offset"], f"{name}.{field['name']}")


if __name__ == "__main__":
    unittest.main()
