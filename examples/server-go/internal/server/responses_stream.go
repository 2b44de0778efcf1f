package server

import (
	"net/http"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// An outputItem has the members of its type: message, reasoning or function_call.
type outputItem struct {
	Type      string          `json:"type"`
	ID        string          `json:"id"`
	Status    string          `json:"status"`
	Role      string          `json:"role,omitempty"`
	Content   *[]contentPiece `json:"content,omitempty"`
	Summary   *[]string       `json:"summary,omitempty"`
	CallID    string          `json:"call_id,omitempty"`
	Name      string          `json:"name,omitempty"`
	Arguments *string         `json:"arguments,omitempty"`
}

type contentPiece struct {
	Type        string    `json:"type"`
	Text        string    `json:"text"`
	Annotations *[]string `json:"annotations,omitempty"`
}

// piece returns the text of a part as the only piece of its item.
func (p *part) piece(text string) contentPiece {
	if p.kind == reasoningPart {
		return contentPiece{Type: "reasoning_text", Text: text}
	}
	return contentPiece{Type: "output_text", Text: text, Annotations: &[]string{}}
}

// status returns the status of a part that has ended.
func (p *part) status() string {
	if p.cut {
		return "incomplete"
	}
	return "completed"
}

// item returns a part as an item. While it is in progress, it has no content.
func (p *part) item(id, status string) outputItem {
	item := outputItem{ID: id, Status: status}
	text := p.text.String()
	if p.kind == callPart {
		item.Type, item.CallID, item.Name, item.Arguments = "function_call", p.id, p.name, &text
		return item
	}
	content := []contentPiece{}
	if status != "in_progress" {
		content = append(content, p.piece(text))
	}
	item.Content = &content
	if p.kind == reasoningPart {
		item.Type, item.Summary = "reasoning", &[]string{}
	} else {
		item.Type, item.Role = "message", "assistant"
	}
	return item
}

// itemIDs are the ids of the items of one response.
type itemIDs struct{ ids []string }

// of returns the id of item i. It is made when it is first needed.
func (ids *itemIDs) of(i int, p *part) string {
	for len(ids.ids) <= i {
		ids.ids = append(ids.ids, newID(map[partKind]string{reasoningPart: "rs_",
			contentPart: "msg_", callPart: "fc_"}[p.kind]))
	}
	return ids.ids[i]
}

// itemEvents sends the parts of a response as items.
type itemEvents struct {
	stream   *eventStream
	ids      itemIDs
	sequence int
}

// An itemEvent is an event about an item. Each type of event has some of the members.
type itemEvent struct {
	Type         string        `json:"type"`
	Sequence     int           `json:"sequence_number"`
	OutputIndex  int           `json:"output_index"`
	ItemID       string        `json:"item_id,omitempty"`
	ContentIndex *int          `json:"content_index,omitempty"`
	Item         *outputItem   `json:"item,omitempty"`
	Part         *contentPiece `json:"part,omitempty"`
	Delta        *string       `json:"delta,omitempty"`
	Text         *string       `json:"text,omitempty"`
	Arguments    *string       `json:"arguments,omitempty"`
	Name         string        `json:"name,omitempty"`
	Logprobs     *[]string     `json:"logprobs,omitempty"`
}

func (e *itemEvents) send(event itemEvent) {
	event.Sequence = e.next()
	e.stream.add(event.Type, event)
}

func (e *itemEvents) next() int {
	e.sequence++
	return e.sequence - 1
}

// A stateEvent has the whole response.
type stateEvent struct {
	Type     string    `json:"type"`
	Sequence int       `json:"sequence_number"`
	Response *response `json:"response"`
}

func (e *itemEvents) state(kind string, r *response) stateEvent {
	return stateEvent{kind, e.next(), r}
}

func (e *itemEvents) sendState(kind string, r *response) { e.stream.add(kind, e.state(kind, r)) }

func (e *itemEvents) begin(index int, p *part) {
	id := e.ids.of(index, p)
	item := p.item(id, "in_progress")
	e.send(itemEvent{Type: "response.output_item.added", OutputIndex: index, Item: &item})
	if p.kind != callPart {
		piece := p.piece("")
		e.send(itemEvent{Type: "response.content_part.added", OutputIndex: index, ItemID: id,
			ContentIndex: new(int), Part: &piece})
	}
}

func (e *itemEvents) extend(index int, p *part, text string) {
	event := itemEvent{OutputIndex: index, ItemID: e.ids.of(index, p), Delta: &text}
	switch p.kind {
	case reasoningPart:
		event.Type, event.ContentIndex = "response.reasoning_text.delta", new(int)
	case contentPart:
		event.Type, event.ContentIndex, event.Logprobs = "response.output_text.delta", new(int),
			&[]string{}
	case callPart:
		event.Type = "response.function_call_arguments.delta"
	}
	e.send(event)
}

func (e *itemEvents) end(index int, p *part) {
	id, text := e.ids.of(index, p), p.text.String()
	if p.kind == callPart {
		e.send(itemEvent{Type: "response.function_call_arguments.done", OutputIndex: index,
			ItemID: id, Name: p.name, Arguments: &text})
	} else {
		done := itemEvent{Type: "response.output_text.done", OutputIndex: index, ItemID: id,
			ContentIndex: new(int), Text: &text, Logprobs: &[]string{}}
		if p.kind == reasoningPart {
			done.Type, done.Logprobs = "response.reasoning_text.done", nil
		}
		e.send(done)
		piece := p.piece(text)
		e.send(itemEvent{Type: "response.content_part.done", OutputIndex: index, ItemID: id,
			ContentIndex: new(int), Part: &piece})
	}
	item := p.item(id, p.status())
	e.send(itemEvent{Type: "response.output_item.done", OutputIndex: index, Item: &item})
}

func (s *Server) streamResponse(w http.ResponseWriter, r *http.Request, c *conversation,
	answer *response) {
	events := &itemEvents{stream: newEventStream(w)}
	events.sendState("response.created", answer)
	events.sendState("response.in_progress", answer)
	divided := &parts{handler: events}
	err := events.stream.flush()
	var last pagedllm.Output
	if err == nil {
		last, err = c.stream(r.Context(), s, events.stream, divided)
	}
	if err == nil {
		err = answer.complete(r.Context(), s, c, &last, divided, &events.ids)
	}
	if err != nil {
		e := toAPIError(err)
		answer.Status, answer.Error = "failed",
			&responseError{Code: nonEmpty(e.code, e.kind()), Message: e.message}
		event := events.state("response.failed", answer)
		events.stream.fail(r.Context(), err, event.Type, event)
		return
	}
	events.sendState("response."+answer.Status, answer)
	events.stream.flush()
}
