package pagedllm

// #include "glue.h"
import "C"

import "encoding/json"

// A Message is one message of a chat: the role, such as "user", and the content.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// RenderChat renders a chat with the model's chat template. The conversation is a []Message, or a
// value that encoding/json encodes as an array of messages or as an object with "messages" and
// variables of the template ("tools", "add_generation_prompt", ...). A json.RawMessage is passed
// unchanged. pllm_engine_render_chat documents the members. Add a request with the result and
// RawPrompt.
func (e *Engine) RenderChat(conversation any) (string, error) {
	messages, err := json.Marshal(conversation)
	if err != nil {
		return "", &Error{Code: ErrInvalidArgument, Message: "the conversation cannot be encoded as JSON (" + err.Error() + ")"}
	}
	return e.makeText(func(engine *C.pllm_engine, out **C.pllm_bytes) *C.pllm_error {
		var args arguments
		defer args.Unpin()
		text, len := args.text(string(messages))
		return C.pllm_engine_render_chat(engine, text, len, out)
	})
}

// Tokenize encodes text as token ids. If addSpecial is true, the tokenizer adds its special tokens,
// such as BOS.
func (e *Engine) Tokenize(text string, addSpecial bool) (tokens []uint32, err error) {
	var args arguments
	defer args.Unpin()
	data, len := args.text(text)
	var flags C.uint32_t
	if addSpecial {
		flags = C.PLLM_TEXT_ADD_SPECIAL
	}
	err = e.engine.use(func(engine *C.pllm_engine) error {
		var out *C.pllm_tokens
		if err := check(C.pllm_engine_tokenize(engine, data, len, flags, &out)); err != nil {
			return err
		}
		defer C.pllm_tokens_free(out)
		tokens = goTokens(C.pllm_tokens_data(out), C.pllm_tokens_len(out))
		return nil
	})
	return tokens, err
}

// Detokenize decodes token ids as text. If skipSpecial is true, special tokens are left out.
func (e *Engine) Detokenize(tokens []uint32, skipSpecial bool) (string, error) {
	var args arguments
	defer args.Unpin()
	if tokens == nil {
		tokens = []uint32{}
	}
	data, len := args.tokens(tokens)
	var flags C.uint32_t
	if skipSpecial {
		flags = C.PLLM_TEXT_SKIP_SPECIAL
	}
	return e.makeText(func(engine *C.pllm_engine, out **C.pllm_bytes) *C.pllm_error {
		return C.pllm_engine_detokenize(engine, data, len, flags, out)
	})
}

// TokenBytes returns the bytes that a token contributes to a text. They can be a part of a
// character. A special token has its name, and an id that only the model knows has no bytes. If the
// id is not below ModelInfo.VocabSize, TokenBytes returns ErrInvalidArgument. If the engine has no
// tokenizer, it returns ErrUnsupported. The first call reads the whole vocabulary.
func (e *Engine) TokenBytes(token uint32) (bytes []byte, err error) {
	err = e.engine.use(func(engine *C.pllm_engine) error {
		var data *C.uint8_t
		var len C.uint64_t
		if err := check(C.pllm_engine_get_token_bytes(engine, C.uint32_t(token), &data, &len)); err != nil {
			return err
		}
		bytes = goBytes(data, len)
		return nil
	})
	return bytes, err
}

func (e *Engine) makeText(call func(*C.pllm_engine, **C.pllm_bytes) *C.pllm_error) (text string, err error) {
	err = e.engine.use(func(engine *C.pllm_engine) error {
		var out *C.pllm_bytes
		if err := check(call(engine, &out)); err != nil {
			return err
		}
		defer C.pllm_bytes_free(out)
		text = goText(C.pllm_bytes_data(out), C.pllm_bytes_len(out))
		return nil
	})
	return text, err
}
