package server

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"unicode/utf8"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// Limits of the log probabilities that the server holds: of one request, and of all requests in
// progress. Each takes about 150 bytes with its JSON.
const (
	maxLogprobs    = 4 << 20
	maxAllLogprobs = 4 * maxLogprobs
)

// reserveLogprobs refuses a request whose log probabilities would take too much memory. Call
// release when the request has ended.
func (s *Server) reserveLogprobs(model *Model, request *pagedllm.Request, prompts []prompt,
	stream bool) (release func(), err error) {
	count := int64(model.heldLogprobs(request, prompts, stream))
	if count > maxLogprobs {
		return nil, badRequest("logprobs", fmt.Sprintf(
			"the answer can have %d log probabilities (limit %d); lower max_tokens or the number "+
				"of alternatives, or stream it", count, maxLogprobs))
	}
	release = func() { s.logprobs.Add(-count) }
	if s.logprobs.Add(count) > maxAllLogprobs {
		release()
		return nil, tryLater(http.StatusTooManyRequests, fmt.Sprintf(
			"the requests in progress have too many log probabilities together (limit %d); "+
				"try again later, lower max_tokens, or stream the answer", maxAllLogprobs))
	}
	return release, nil
}

// heldLogprobs returns the maximum number of log probabilities that an answer holds at once. A
// stream holds those of its prompts, and all if it has only the best of several sequences.
func (m *Model) heldLogprobs(request *pagedllm.Request, prompts []prompt, stream bool) (count int) {
	sampling, sequences := &request.Sampling, sequencesOf(request)
	for _, prompt := range prompts {
		length := len(prompt.tokens)
		if request.TruncatePrompt > 0 {
			length = min(length, request.TruncatePrompt)
		}
		generated := max(0, m.Engine.ModelInfo().MaxModelLen-length)
		if sampling.MaxTokens > 0 || sampling.PromptOnly {
			generated = min(generated, sampling.MaxTokens)
		}
		if stream && request.Beam == nil && sequences == max(request.N, 1) {
			generated = 0
		}
		if sampling.Echo {
			generated += length
		}
		if sampling.LogProbs {
			count += sequences * generated * (sampling.TopLogProbs + 1)
		}
		if sampling.PromptLogProbs {
			count += length * (sampling.PromptTopLogProbs + 1)
		}
	}
	return count
}

// A tokenTable caches the texts of tokens. Each is added when it is first needed.
type tokenTable []atomic.Pointer[tokenText]

// A tokenText is a token as text. printable has escapes (\xe2) if the bytes of the token are not
// whole characters.
type tokenText struct {
	printable string
	bytes     byteList
	// hidden is true for a special token, which the text of an answer leaves out.
	hidden bool
}

func (m *Model) tokenText(token uint32) (*tokenText, error) {
	if int(token) >= len(m.tokens) {
		return nil, badRequest("", fmt.Sprintf("the token id %d is not in the vocabulary (%d "+
			"tokens); use a smaller id", token, len(m.tokens)))
	}
	if text := m.tokens[token].Load(); text != nil {
		return text, nil
	}
	bytes, err := m.Engine.TokenBytes(token)
	if err != nil {
		return nil, err
	}
	visible, err := m.Engine.Detokenize([]uint32{token}, true)
	if err != nil {
		return nil, err
	}
	shown, err := m.Engine.Detokenize([]uint32{token}, false)
	if err != nil {
		return nil, err
	}
	text := &tokenText{printable(bytes), bytes, visible == "" && shown != ""}
	m.tokens[token].Store(text)
	return text, nil
}

// A tokenScore is a token with its log probability.
type tokenScore struct {
	Token   string   `json:"token"`
	ID      uint32   `json:"id"`
	Bytes   byteList `json:"bytes"`
	Logprob float32  `json:"logprob"`
}

// A tokenLogprob is a token of an answer with its alternatives, in the form of a chat.
type tokenLogprob struct {
	tokenScore
	TopLogprobs []tokenScore `json:"top_logprobs"`
}

// A promptLogprob is the log probability of a token of a prompt.
type promptLogprob struct {
	Logprob     float32      `json:"logprob"`
	TopLogprobs []tokenScore `json:"top_logprobs,omitempty"`
}

// byteList is an array of numbers in JSON, where []byte would be base64.
type byteList []byte

func (b byteList) MarshalJSON() ([]byte, error) {
	text := []byte{'['}
	for i, value := range b {
		if i > 0 {
			text = append(text, ',')
		}
		text = strconv.AppendInt(text, int64(value), 10)
	}
	return append(text, ']'), nil
}

func (m *Model) score(token uint32, logprob float32) (tokenScore, error) {
	text, err := m.tokenText(token)
	if err != nil {
		return tokenScore{}, err
	}
	return tokenScore{Token: text.printable, ID: token, Bytes: text.bytes,
		Logprob: finite(logprob)}, nil
}

func (m *Model) scores(top []pagedllm.LogProb) ([]tokenScore, error) {
	scores := make([]tokenScore, 0, len(top))
	for _, candidate := range top {
		score, err := m.score(candidate.Token, candidate.LogProb)
		if err != nil {
			return nil, err
		}
		scores = append(scores, score)
	}
	return scores, nil
}

// finite replaces -Inf, which JSON lacks, by the value that OpenAI documents for unlikely tokens.
func finite(logprob float32) float32 { return max(logprob, -9999) }

func isNaN(value float32) bool { return value != value }

// printable returns the bytes of a token as text, with escapes if they are not UTF-8.
func printable(bytes []byte) string {
	if utf8.Valid(bytes) {
		return string(bytes)
	}
	var text strings.Builder
	for _, value := range bytes {
		fmt.Fprintf(&text, `\x%02x`, value)
	}
	return text.String()
}

// completionLogprobs are log probabilities in the form of a completion: columns.
type completionLogprobs struct {
	Tokens        []string             `json:"tokens"`
	TokenLogprobs []*float32           `json:"token_logprobs"`
	TopLogprobs   []map[string]float32 `json:"top_logprobs"`
	TextOffset    []int                `json:"text_offset"`
}

// A textPosition counts the characters of a text that is made of tokens.
type textPosition struct {
	characters int
	partial    []byte // of the next character
}

// advance adds a token and returns the position of its first character. A token within a character
// has the position of that character.
func (p *textPosition) advance(token *tokenText) (offset int) {
	offset = p.characters
	if token.hidden {
		return offset
	}
	p.partial = append(p.partial, token.bytes...)
	for len(p.partial) > 0 && utf8.FullRune(p.partial) {
		_, size := utf8.DecodeRune(p.partial)
		p.partial = p.partial[size:]
		p.characters++
	}
	return offset
}

// completionLogprobs converts the log probabilities of an output. The first token of an echoed
// prompt has none. position is that before the output.
func (m *Model) completionLogprobs(ctx context.Context, output *pagedllm.Output, top int,
	position *textPosition) (*completionLogprobs, error) {
	columns := &completionLogprobs{}
	for i, token := range output.Tokens {
		if err := ctx.Err(); err != nil { // the client has gone
			return nil, err
		}
		text, err := m.tokenText(token)
		if err != nil {
			return nil, err
		}
		columns.Tokens = append(columns.Tokens, text.printable)
		columns.TextOffset = append(columns.TextOffset, position.advance(text))
		var logprob *float32
		var candidates map[string]float32
		if i < len(output.LogProbs) && !isNaN(output.LogProbs[i]) {
			logprob = pagedllm.Ptr(finite(output.LogProbs[i]))
			if top > 0 && i < len(output.TopLogProbs) {
				candidates = make(map[string]float32)
				for _, candidate := range output.TopLogProbs[i] {
					text, err := m.tokenText(candidate.Token)
					if err != nil {
						return nil, err
					}
					candidates[text.printable] = finite(candidate.LogProb)
				}
			}
		}
		columns.TokenLogprobs = append(columns.TokenLogprobs, logprob)
		if top > 0 {
			columns.TopLogprobs = append(columns.TopLogprobs, candidates)
		}
	}
	return columns, nil
}

// chatLogprobs are log probabilities in the form of a chat: rows.
type chatLogprobs struct {
	Content []tokenLogprob `json:"content"`
}

func (m *Model) chatLogprobs(ctx context.Context, output *pagedllm.Output) (
	rows []tokenLogprob, err error) {
	for i := range min(len(output.Tokens), len(output.LogProbs)) {
		var row tokenLogprob
		if row.tokenScore, err = m.score(output.Tokens[i], output.LogProbs[i]); err != nil {
			return nil, err
		}
		var top []pagedllm.LogProb
		if i < len(output.TopLogProbs) {
			top = output.TopLogProbs[i]
		}
		if row.TopLogprobs, err = m.scores(top); err != nil {
			return nil, err
		}
		if err := ctx.Err(); err != nil { // the client has gone
			return nil, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// report returns the extensions of a choice that the request asked for.
func (p *samplingParams) report(ctx context.Context, model *Model,
	output *pagedllm.Output) (x choiceExtensions, err error) {
	if p.ReturnTokenIDs {
		x.TokenIDs = output.Tokens
	}
	if output.FinishReason != pagedllm.FinishNone && (p.Beam != nil || p.BestOf != nil) {
		x.Score = pagedllm.Ptr(output.Score)
	}
	if p.PromptLogprobs == nil || output.Index != 0 { // of several samples, the first reports them
		return x, nil
	}
	start := 1
	if p.PromptLogprobsStart != nil {
		start = max(start, *p.PromptLogprobsStart)
	}
	x.PromptLogprobs = make([]*promptLogprob, start, start+len(output.PromptLogProbs))
	for i, logprob := range output.PromptLogProbs {
		entry := &promptLogprob{Logprob: finite(logprob)}
		if i < len(output.PromptTopLogProbs) {
			entry.TopLogprobs, err = model.scores(output.PromptTopLogProbs[i])
		}
		if err == nil {
			err = ctx.Err() // the client has gone
		}
		if err != nil {
			return x, err
		}
		x.PromptLogprobs = append(x.PromptLogprobs, entry)
	}
	return x, nil
}
