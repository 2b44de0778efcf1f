"""Three prompts at once, streamed as their text comes; the second is aborted after a few tokens.
usage: hello.py LIBPAGEDLLM_SO MODEL_DIR"""
import ctypes, json, sys
from ctypes import byref, c_char_p, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p, sizeof

def struct(name, fields):  # "name:type" in the order of pagedllm.h
    types = {"u64": c_uint64, "u32": c_uint32, "i32": c_int32, "f32": c_float, "ptr": c_void_p}
    return type(name, (ctypes.Structure,), {"_fields_": [(f.split(":")[0], types[f.split(":")[1]]) for f in fields.split()]})

Options = struct("Options", "size:u64 model_path:ptr model_path_len:u64 device:ptr device_len:u64 kv_bytes:u64 seed:u64 block_size:u32 "
    "kv_dtype:u32 max_model_len:u32 max_batch_tokens:u32 max_seqs:u32 prefill_chunk:u32 threads:u32 isa:u32 flags:u32 reserved:u32")
Sampling = struct("Sampling", "size:u64 seed:u64 stop_ids:ptr stop_ids_len:u64 stop:ptr stop_lens:ptr stop_count:u64 "
    "temperature:f32 top_p:f32 min_p:f32 top_k:u32 max_tokens:u32 min_tokens:u32 flags:u32 reserved:u32")
Request = struct("Request", "size:u64 prompt:ptr prompt_len:u64 tokens:ptr tokens_len:u64 sampling:ptr user_data:u64 n:u32 text_flags:u32")
Step = struct("Step", "size:u64 unfinished:u64 prefill_tokens:u64 decode_tokens:u64 sequences:u64")
Output = struct("Output", "size:u64 request:u64 sequence:u64 user_data:u64 tokens:ptr tokens_len:u64 logprobs:ptr text:ptr text_len:u64 "
    "error:ptr error_len:u64 prompt_tokens:u64 generated_tokens:u64 index:u32 finish:u32 error_code:i32 reserved:u32")
FINISH, SKIP_SPECIAL = ["", " (stop)", " (length)", " (abort)", " (ended)"], 2
lib = ctypes.CDLL(sys.argv[1])
for name in "engine_create engine_render_chat engine_add_request engine_abort engine_step engine_queue queue_poll outputs_get bytes_data".split():
    getattr(lib, "pllm_" + name).restype = c_void_p
lib.pllm_error_message.restype = c_char_p
lib.pllm_outputs_len.restype = lib.pllm_bytes_len.restype = c_uint64

def call(name, *args):  # a pllm_* function that can fail
    error = getattr(lib, "pllm_" + name)(*args)
    if error:
        message = lib.pllm_error_message(c_void_p(error)).decode()
        lib.pllm_error_free(c_void_p(error))
        raise RuntimeError(message)

def made(kind, init, **fields):  # a struct with the library's defaults, then ours
    value = kind()
    getattr(lib, f"pllm_{init}_init")(byref(value), c_uint64(sizeof(value)))
    for field, x in fields.items(): setattr(value, field, ctypes.cast(x, c_void_p).value if isinstance(x, c_char_p) else x)
    return value
engine, path = c_void_p(), sys.argv[2].encode()
call("engine_create", byref(made(Options, "engine_options", model_path=c_char_p(path), model_path_len=len(path))), byref(engine))
greedy = made(Sampling, "sampling", temperature=0)
def ask(question):
    prompt, chat, request_id = c_void_p(), json.dumps([{"role": "user", "content": question}]).encode(), c_uint64()
    call("engine_render_chat", engine, chat, c_uint64(len(chat)), byref(prompt))
    request = made(Request, "request", prompt=lib.pllm_bytes_data(prompt), prompt_len=lib.pllm_bytes_len(prompt),
                   sampling=ctypes.addressof(greedy), text_flags=SKIP_SPECIAL)
    call("engine_add_request", engine, byref(request), byref(request_id))
    lib.pllm_bytes_free(prompt)
    print(f"[{request_id.value}] {question}")
    return request_id.value
_, story, _ = ask("What is the capital of France?"), ask("Tell me a short story."), ask("What is 7 + 5?")
step = Step(size=sizeof(Step), unfinished=1)
while step.unfinished:
    outputs = c_void_p()
    call("engine_step", engine, byref(step))
    call("queue_poll", c_void_p(lib.pllm_engine_queue(engine)), c_int64(0), byref(outputs))
    for i in range(lib.pllm_outputs_len(outputs)):
        o = Output.from_address(lib.pllm_outputs_get(outputs, c_uint64(i)))
        print(f"[{o.request}] {ctypes.string_at(o.text or b'', o.text_len).decode()}{FINISH[min(o.finish, 4)]}")
        if o.request == story and o.generated_tokens == 8 and not o.finish: call("engine_abort", engine, c_uint64(story))
    lib.pllm_outputs_free(outputs)
lib.pllm_engine_free(engine)
