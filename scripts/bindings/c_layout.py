"""tests/ffi/c/layout.h: the value of each constant, and the size and the offsets of each struct."""
from abi import NOTICE


def files(abi, _root):
    text = f"// {NOTICE}\n// header_alone.c defines the macros.\n\n"
    for constant in abi.constants:
        value = f"UINT64_C({constant.value})" if constant.type == "u64" else constant.value
        text += f"ALWAYS({constant.name} == {value});\n"
    for struct in abi.records:
        text += f"\nSIZE({struct.name}, {struct.size});\n"
        text += "".join(f"AT({struct.name}, {field.name}, {field.offset});\n" for field in struct.fields)
    return {"tests/ffi/c/layout.h": text}
