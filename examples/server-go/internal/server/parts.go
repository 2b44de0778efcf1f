package server

import (
	"strings"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// A part is a stretch of reasoning, of content, or a tool call.
type part struct {
	kind     partKind
	id, name string // of a tool call
	text     strings.Builder
	// cut is true if the response has ended within the part.
	cut bool
}

type partKind int

const (
	reasoningPart partKind = iota
	contentPart
	callPart
)

// parts are the parts of one response so far.
type parts struct {
	all []*part
	// handler reports the parts to a stream. It may be nil.
	handler partHandler
}

// A partHandler sends the parts of a response as events. index counts the parts.
type partHandler interface {
	begin(index int, p *part)
	extend(index int, p *part, text string)
	end(index int, p *part)
}

func (p *parts) add(delta *pagedllm.ResponseDelta) {
	if delta.ReasoningContent != "" {
		p.extend(reasoningPart, delta.ReasoningContent)
	}
	if delta.Content != "" {
		p.extend(contentPart, delta.Content)
	}
	for i := range delta.ToolCalls {
		if call := &delta.ToolCalls[i]; call.ID != "" {
			p.begin(&part{kind: callPart, id: call.ID, name: call.Function.Name})
		}
		p.extend(callPart, delta.ToolCalls[i].Function.Arguments)
	}
}

func (p *parts) begin(next *part) {
	p.end()
	p.all = append(p.all, next)
	if p.handler != nil {
		p.handler.begin(len(p.all)-1, next)
	}
}

func (p *parts) extend(kind partKind, text string) {
	if len(p.all) == 0 || p.all[len(p.all)-1].kind != kind {
		p.begin(&part{kind: kind})
	}
	last := p.all[len(p.all)-1]
	last.text.WriteString(text)
	if p.handler != nil && text != "" {
		p.handler.extend(len(p.all)-1, last, text)
	}
}

// end ends the last part. The response may continue with another.
func (p *parts) end() {
	if len(p.all) > 0 && p.handler != nil {
		p.handler.end(len(p.all)-1, p.all[len(p.all)-1])
	}
}

// finish ends the response. A call is complete if its arguments are an object.
func (p *parts) finish(output *pagedllm.Output) {
	if len(p.all) > 0 {
		last := p.all[len(p.all)-1]
		reason, _ := finishReason(output)
		last.cut = reason == "length"
		if last.kind == callPart {
			last.cut = !isObject(last.text.String())
		}
	}
	p.end()
}

// text returns the texts of all parts of a kind.
func (p *parts) text(kind partKind) string {
	var text strings.Builder
	for _, part := range p.all {
		if part.kind == kind {
			text.WriteString(part.text.String())
		}
	}
	return text.String()
}

func (p *parts) hasCalls() bool {
	for _, part := range p.all {
		if part.kind == callPart {
			return true
		}
	}
	return false
}
