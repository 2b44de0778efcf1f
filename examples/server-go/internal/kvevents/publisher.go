package kvevents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// A Source has the KV events of one model. *pagedllm.Engine implements it.
type Source interface {
	PollKVEvents() ([]pagedllm.KVEvent, error)
	SnapshotKVEvents() ([]pagedllm.KVEvent, error)
}

// Options of a publisher.
type Options struct {
	Topic    string
	Encoding Encoding
	// Batches is the number of past batches that are kept for Replay.
	Batches int
	// Send sends a message to the subscribers of a topic, and must not wait for them.
	Send func(topic string, frames ...[]byte)
	Log  *slog.Logger
}

const (
	pollInterval = 10 * time.Millisecond
	// maxKeptBytes bounds the batches that are kept, besides their number.
	maxKeptBytes = 64 << 20
)

// A Publisher sends the events of one model. Each step with events is one batch. Batches have
// consecutive sequence numbers from 0 on.
type Publisher struct {
	source  Source
	options Options
	quit    chan struct{}
	done    sync.WaitGroup

	mu sync.Mutex
	// cached has the blocks that the batches until now have stored and not removed.
	cached    map[pagedllm.KVHash]block
	next      uint64 // sequence number of the next batch
	kept      []batch
	keptBytes int
	failed    bool
}

type block struct {
	group  int
	marked bool // used by difference
}

type batch struct {
	sequence uint64
	step     uint64 // of the engine
	payload  []byte
}

// Start starts a publisher. The source must stay open until Close.
func Start(source Source, options Options) *Publisher {
	p := newPublisher(source, options)
	p.done.Add(1)
	go p.run()
	return p
}

func newPublisher(source Source, options Options) *Publisher {
	return &Publisher{source: source, options: options, quit: make(chan struct{}),
		cached: make(map[pagedllm.KVHash]block)}
}

// Close ends the publisher. Events that have not been sent yet are dropped.
func (p *Publisher) Close() {
	close(p.quit)
	p.done.Wait()
}

func (p *Publisher) run() {
	defer p.done.Done()
	ticks := time.NewTicker(pollInterval)
	defer ticks.Stop()
	for {
		select {
		case <-ticks.C:
		case <-p.quit:
			return
		}
		p.mu.Lock()
		_, err := p.poll()
		p.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// poll publishes the events since the last call, and returns their batches. It returns an error if
// there will be no further events.
func (p *Publisher) poll() (published []batch, err error) {
	if p.failed {
		return nil, errors.New("the engine has failed")
	}
	events, err := p.source.PollKVEvents()
	switch {
	case errors.Is(err, pagedllm.ErrOutOfMemory):
		return nil, nil // the next call returns the events
	case errors.Is(err, pagedllm.ErrClosed):
		return nil, err // the server shuts down
	case err != nil:
		p.options.Log.Error("no more KV events: the engine has failed", "topic", p.options.Topic,
			"error", err.Error())
		p.failed = true
		p.publish(0, time.Now(), []pagedllm.KVEvent{{Kind: pagedllm.KVCleared}})
		return nil, err
	}
	for begin := 0; begin < len(events); {
		end := begin + 1
		for end < len(events) && events[end].SequenceNumber == events[begin].SequenceNumber {
			end++
		}
		published = append(published, p.step(events[begin:end])...)
		begin = end
	}
	return published, nil
}

// step publishes the events of one step. It returns no batch if the step changes nothing.
func (p *Publisher) step(events []pagedllm.KVEvent) []batch {
	number, when := events[0].SequenceNumber, events[0].Time
	if events[0].Kind == pagedllm.KVCleared {
		// The engine dropped events, because there were more than Options.KVEventsCapacity.
		events = p.difference(events[1:])
	}
	for i := range events {
		switch event := &events[i]; event.Kind {
		case pagedllm.KVStored:
			p.cached[event.Hash] = block{group: event.Group}
		case pagedllm.KVRemoved:
			delete(p.cached, event.Hash)
		}
	}
	if len(events) == 0 {
		return nil
	}
	return []batch{p.publish(number, when, events)}
}

// difference returns the events that lead from the published blocks to those of a snapshot. It
// replaces AllBlocksCleared, because some routers ignore that event, and because it is shorter.
func (p *Publisher) difference(snapshot []pagedllm.KVEvent) (events []pagedllm.KVEvent) {
	var stored []pagedllm.KVEvent
	for i := range snapshot {
		hash := snapshot[i].Hash
		if known, ok := p.cached[hash]; ok {
			known.marked = true
			p.cached[hash] = known
		} else {
			stored = append(stored, snapshot[i])
		}
	}
	for hash, known := range p.cached {
		if !known.marked {
			events = append(events, pagedllm.KVEvent{Kind: pagedllm.KVRemoved, Hash: hash,
				Group: known.group})
		}
		p.cached[hash] = block{group: known.group}
	}
	return append(events, parentsFirst(stored)...)
}

// parentsFirst sorts stored blocks of a snapshot, which has them in no order: each block follows
// its parent, so that readers know the parent, and so that the blocks of a sequence are one event.
func parentsFirst(stored []pagedllm.KVEvent) []pagedllm.KVEvent {
	present := make(map[pagedllm.KVHash]bool, len(stored))
	for i := range stored {
		present[stored[i].Hash] = true
	}
	children := make(map[pagedllm.KVHash][]int)
	var stack []int // to be appended, the last one first
	for i := range stored {
		if parent := stored[i].ParentHash; stored[i].FirstToken > 0 && present[parent] {
			children[parent] = append(children[parent], i)
		} else {
			stack = append(stack, i)
		}
	}
	sorted := make([]pagedllm.KVEvent, 0, len(stored))
	for len(stack) > 0 {
		i := stack[len(stack)-1]
		stack = append(stack[:len(stack)-1], children[stored[i].Hash]...)
		sorted = append(sorted, stored[i])
	}
	return sorted
}

func (p *Publisher) publish(step uint64, when time.Time, events []pagedllm.KVEvent) batch {
	b := batch{p.next, step, p.options.Encoding.batch(when, events)}
	p.next++
	p.options.Send(p.options.Topic, binary.BigEndian.AppendUint64(nil, b.sequence), b.payload)
	p.keep(b)
	return b
}

// keep adds a batch to those for Replay.
func (p *Publisher) keep(b batch) {
	p.kept = append(p.kept, b)
	p.keptBytes += len(b.payload)
	// The last batch stays, whatever its size.
	for len(p.kept) > p.options.Batches || (p.keptBytes > maxKeptBytes && len(p.kept) > 1) {
		p.keptBytes -= len(p.kept[0].payload)
		p.kept[0] = batch{}
		p.kept = p.kept[1:]
	}
}

// Replay answers a request of the replay socket: an empty frame and a sequence number. The answers
// are the batches from this number on, and an end marker. If some of these batches are no longer
// kept, the first answer replaces them: AllBlocksCleared, and BlockStored of each block.
func (p *Publisher) Replay(request [][]byte) (answers [][][]byte, err error) {
	if len(request) != 2 || len(request[0]) != 0 || len(request[1]) != 8 {
		return nil, errors.New("a request for KV events is not an empty frame and 8 bytes")
	}
	batches, err := p.batchesFrom(binary.BigEndian.Uint64(request[1]))
	if err != nil {
		return nil, fmt.Errorf("KV events cannot be repeated: %w", err)
	}
	for _, b := range batches {
		sequence := binary.BigEndian.AppendUint64(nil, b.sequence)
		answers = append(answers, p.answer(p.options.Topic, sequence, b.payload))
	}
	const endMarker = "\xff\xff\xff\xff\xff\xff\xff\xff" // -1
	return append(answers, p.answer("", []byte(endMarker), nil)), nil
}

func (p *Publisher) answer(topic string, sequence, payload []byte) [][]byte {
	if p.options.Encoding.Arrays {
		return [][]byte{nil, sequence, payload}
	}
	return [][]byte{nil, []byte(topic), sequence, payload}
}

func (p *Publisher) batchesFrom(first uint64) ([]batch, error) {
	p.mu.Lock()
	if oldest := p.next - uint64(len(p.kept)); first >= oldest || p.failed {
		defer p.mu.Unlock()
		begin := 0
		if first > oldest {
			begin = int(min(first-oldest, uint64(len(p.kept))))
		}
		return append([]batch(nil), p.kept[begin:]...), nil
	}
	snapshot, newer, err := p.snapshot()
	p.mu.Unlock()
	if err != nil {
		return nil, err
	}
	events := append(snapshot.events[:1:1], parentsFirst(snapshot.events[1:])...)
	payload := p.options.Encoding.batch(snapshot.when, events)
	return append([]batch{{sequence: snapshot.sequence, payload: payload}}, newer...), nil
}

type snapshot struct {
	sequence uint64 // of the last batch whose events it contains
	when     time.Time
	events   []pagedllm.KVEvent
}

// snapshot returns the blocks that are cached, and the batches that are newer. At least one batch
// has been published.
func (p *Publisher) snapshot() (s snapshot, newer []batch, err error) {
	if s.events, err = p.source.SnapshotKVEvents(); err != nil {
		return s, nil, err
	}
	s.sequence, s.when = p.next-1, s.events[0].Time
	// The engine may have made steps since the last poll. The snapshot contains some of them.
	if newer, err = p.poll(); err != nil {
		return s, nil, err
	}
	for len(newer) > 0 && newer[0].step <= s.events[0].SequenceNumber {
		s.sequence = newer[0].sequence
		newer = newer[1:]
	}
	return s, newer, nil
}
