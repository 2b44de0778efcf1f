package server

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// A tokenLogprob is a token with its log probability in the form of a chat. Token has escapes
// (\xe2) if the bytes of the token are not whole characters; Bytes is always exact.
type tokenLogprob struct {
	Token       string         `json:"token"`
	ID          uint32         `json:"id"`
	Bytes       byteList       `json:"bytes"`
	Logprob     float32        `json:"logprob"`
	TopLogprobs []tokenLogprob `json:"top_logprobs"`
}

// A promptLogprob is the log probability of a token of a prompt.
type promptLogprob struct {
	Logprob     float32        `json:"logprob"`
	TopLogprobs []tokenLogprob `json:"top_logprobs,omitempty"`
}

// byteList is an array of numbers in JSON, where []byte would be base64.
type byteList []byte

func (b byteList) MarshalJSON() ([]byte, error) {
	text := []byte{'['}
	for i, value := range b {
		if i > 0 {
			text = append(text, ',')
		}
		text = fmt.Append(text, value)
	}
	return append(text, ']'), nil
}

func (m *Model) tokenLogprob(token uint32, logprob float32, top []pagedllm.LogProb) (entry tokenLogprob, err error) {
	bytes, err := m.Engine.TokenBytes(token)
	if err != nil {
		return entry, err
	}
	entry = tokenLogprob{Token: printable(bytes), ID: token, Bytes: bytes, Logprob: finite(logprob)}
	entry.TopLogprobs, err = m.topLogprobs(top)
	return entry, err
}

func (m *Model) topLogprobs(top []pagedllm.LogProb) ([]tokenLogprob, error) {
	entries := make([]tokenLogprob, 0, len(top))
	for _, candidate := range top {
		entry, err := m.tokenLogprob(candidate.Token, candidate.LogProb, nil)
		if err != nil {
			return nil, err
		}
		entries = append(entries, entry)
	}
	return entries, nil
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

// completionLogprobs converts the log probabilities of an output. The first token of an echoed
// prompt has none. offset is the number of characters before the output.
func (m *Model) completionLogprobs(output *pagedllm.Output, top int, offset *int) (*completionLogprobs, error) {
	columns := &completionLogprobs{Tokens: []string{}, TokenLogprobs: []*float32{}, TextOffset: []int{}}
	for i, token := range output.Tokens {
		bytes, err := m.Engine.TokenBytes(token)
		if err != nil {
			return nil, err
		}
		columns.Tokens = append(columns.Tokens, printable(bytes))
		columns.TextOffset = append(columns.TextOffset, *offset)
		*offset += utf8.RuneCount(bytes)
		var logprob *float32
		var candidates map[string]float32
		if i < len(output.LogProbs) && !isNaN(output.LogProbs[i]) {
			logprob = pagedllm.Ptr(finite(output.LogProbs[i]))
			if top > 0 && i < len(output.TopLogProbs) {
				candidates = make(map[string]float32)
				for _, candidate := range output.TopLogProbs[i] {
					bytes, err := m.Engine.TokenBytes(candidate.Token)
					if err != nil {
						return nil, err
					}
					candidates[printable(bytes)] = finite(candidate.LogProb)
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

func (m *Model) chatLogprobs(output *pagedllm.Output) (rows []tokenLogprob, err error) {
	for i, token := range output.Tokens {
		if i >= len(output.LogProbs) {
			break
		}
		var top []pagedllm.LogProb
		if i < len(output.TopLogProbs) {
			top = output.TopLogProbs[i]
		}
		row, err := m.tokenLogprob(token, output.LogProbs[i], top)
		if err != nil {
			return nil, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// report returns the extensions of a choice that the request asked for.
func (p *samplingParams) report(model *Model, output *pagedllm.Output) (x choiceExtensions, err error) {
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
			entry.TopLogprobs, err = model.topLogprobs(output.PromptTopLogProbs[i])
		}
		if err != nil {
			return x, err
		}
		x.PromptLogprobs = append(x.PromptLogprobs, entry)
	}
	return x, nil
}
