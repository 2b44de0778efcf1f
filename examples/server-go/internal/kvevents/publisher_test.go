package kvevents

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// script is a source with prepared results. After the last one, there are no events.
type script struct {
	polls     [][]pagedllm.KVEvent
	snapshots [][]pagedllm.KVEvent
	failure   error
}

func (s *script) PollKVEvents() (events []pagedllm.KVEvent, err error) {
	if len(s.polls) > 0 {
		events, s.polls = s.polls[0], s.polls[1:]
		return events, nil
	}
	return nil, s.failure
}

func (s *script) SnapshotKVEvents() (events []pagedllm.KVEvent, err error) {
	events, s.snapshots = s.snapshots[0], s.snapshots[1:]
	return events, nil
}

func name(n byte) (hash pagedllm.KVHash) {
	hash[31] = n
	return hash
}

var when = time.UnixMicro(1_500_000)

// stored returns block n with the block before it, 0 for the first one of a sequence.
func stored(step uint64, n, parent byte) pagedllm.KVEvent {
	return pagedllm.KVEvent{SequenceNumber: step, Time: when, Kind: pagedllm.KVStored,
		Hash: name(n), ParentHash: name(parent), Tokens: []uint32{uint32(n), 1},
		FirstToken: 2 * int(parent)}
}

func removed(step uint64, n byte) pagedllm.KVEvent {
	return pagedllm.KVEvent{SequenceNumber: step, Time: when, Kind: pagedllm.KVRemoved, Hash: name(n)}
}

func cleared(step uint64) pagedllm.KVEvent {
	return pagedllm.KVEvent{SequenceNumber: step, Time: when, Kind: pagedllm.KVCleared}
}

// A sent batch has a sequence number and events.
type sent struct {
	sequence uint64
	events   []pagedllm.KVEvent
}

func (s sent) frames(encoding Encoding) [][]byte {
	return [][]byte{binary.BigEndian.AppendUint64(nil, s.sequence), encoding.batch(when, s.events)}
}

// prepare returns a publisher of a script, and the messages that it sends.
func prepare(source Source, batches int) (p *Publisher, messages *[][][]byte) {
	messages = new([][][]byte)
	return newPublisher(source, Options{Topic: "topic", Batches: batches,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Send: func(topic string, frames ...[]byte) {
			if topic == "topic" {
				*messages = append(*messages, frames)
			}
		}}), messages
}

func expect(t *testing.T, messages [][][]byte, want ...sent) {
	t.Helper()
	if len(messages) != len(want) {
		t.Fatalf("%d messages instead of %d", len(messages), len(want))
	}
	for i := range want {
		if frames := want[i].frames(Encoding{}); !slices.EqualFunc(messages[i], frames, bytes.Equal) {
			t.Errorf("message %d:\n%q instead of\n%q", i, messages[i], frames)
		}
	}
}

func TestEachStepIsABatch(t *testing.T) {
	p, messages := prepare(&script{polls: [][]pagedllm.KVEvent{
		{stored(1, 1, 0), stored(1, 2, 1), removed(2, 2)}, {}, {stored(3, 3, 1)}}}, 10)
	for range 4 {
		if _, err := p.poll(); err != nil {
			t.Fatal(err)
		}
	}
	expect(t, *messages, sent{0, []pagedllm.KVEvent{stored(1, 1, 0), stored(1, 2, 1)}},
		sent{1, []pagedllm.KVEvent{removed(2, 2)}}, sent{2, []pagedllm.KVEvent{stored(3, 3, 1)}})
}

func TestDroppedEventsAreReplacedByTheDifference(t *testing.T) {
	p, messages := prepare(&script{polls: [][]pagedllm.KVEvent{
		{stored(1, 1, 0), stored(1, 2, 1)},
		{cleared(9), stored(9, 5, 4), stored(9, 4, 3), stored(9, 1, 0), stored(9, 3, 1)},
		{cleared(11), stored(11, 1, 0), stored(11, 3, 1), stored(11, 4, 3), stored(11, 5, 4)},
		{cleared(12)}}}, 10)
	for range 4 {
		if _, err := p.poll(); err != nil {
			t.Fatal(err)
		}
	}
	// Without a difference, there is no batch. The last difference has any order.
	if len(*messages) != 3 {
		t.Fatalf("%d messages", len(*messages))
	}
	expect(t, (*messages)[:2], sent{0, []pagedllm.KVEvent{stored(1, 1, 0), stored(1, 2, 1)}},
		sent{1, []pagedllm.KVEvent{removed(9, 2), stored(9, 3, 1), stored(9, 4, 3), stored(9, 5, 4)}})
	if len(p.cached) != 0 {
		t.Error(p.cached)
	}
}

func TestAReplayOfLostBatchesBeginsWithASnapshot(t *testing.T) {
	// Between the snapshot, which has the steps until 3, and the poll there is a step 4.
	source := &script{polls: [][]pagedllm.KVEvent{{stored(1, 1, 0), stored(2, 2, 1)},
		{stored(3, 3, 2), removed(4, 3), removed(5, 2)}},
		snapshots: [][]pagedllm.KVEvent{
			{cleared(3), stored(3, 3, 2), stored(3, 2, 1), stored(3, 1, 0)}}}
	p, messages := prepare(source, 1)
	p.poll()
	answers, err := p.Replay([][]byte{nil, make([]byte, 8)})
	if err != nil {
		t.Fatal(err)
	}
	want := []sent{{2, []pagedllm.KVEvent{cleared(3), stored(3, 1, 0), stored(3, 2, 1),
		stored(3, 3, 2)}}, {3, []pagedllm.KVEvent{removed(4, 3)}},
		{4, []pagedllm.KVEvent{removed(5, 2)}}}
	for i, answer := range answers[:len(want)] {
		if len(answer[0]) != 0 || string(answer[1]) != "topic" {
			t.Errorf("%q", answer)
		}
		answers[i] = answer[2:]
	}
	expect(t, answers[:len(want)], want...)
	last := answers[len(answers)-1]
	if len(answers) != 4 || string(bytes.Join(last, nil)) != "\xff\xff\xff\xff\xff\xff\xff\xff" {
		t.Errorf("%q", answers)
	}
	if len(*messages) != 5 || len(p.kept) != 1 {
		t.Error(len(*messages), len(p.kept))
	}
}

func TestKeptBatchesHaveALimit(t *testing.T) {
	p, _ := prepare(&script{}, 100)
	for sequence := range 5 {
		p.keep(batch{sequence: uint64(sequence), payload: make([]byte, maxKeptBytes/3)})
	}
	if len(p.kept) != 3 || p.keptBytes != maxKeptBytes/3*3 || p.kept[0].sequence != 2 {
		t.Error(len(p.kept), p.keptBytes)
	}
	p.keep(batch{sequence: 5, payload: make([]byte, maxKeptBytes+1)})
	if len(p.kept) != 1 || p.kept[0].sequence != 5 {
		t.Error(len(p.kept))
	}
}

func TestAFailedEngineHasNoBlocks(t *testing.T) {
	source := &script{polls: [][]pagedllm.KVEvent{{stored(1, 1, 0)}, {stored(2, 2, 1)}},
		failure: pagedllm.ErrOutOfMemory}
	p, messages := prepare(source, 2)
	for range 3 { // memory that is missing for a while is no failure
		if _, err := p.poll(); err != nil {
			t.Fatal(err)
		}
	}
	source.failure = pagedllm.ErrInternal
	for range 2 {
		if _, err := p.poll(); err == nil {
			t.Fatal("no error")
		}
	}
	if len(*messages) != 3 || !bytes.Contains((*messages)[2][1], []byte("AllBlocksCleared")) {
		t.Errorf("%q", *messages)
	}
	answers, err := p.Replay([][]byte{nil, make([]byte, 8)})
	if err != nil || len(answers) != 3 {
		t.Errorf("%q, %v", answers, err)
	}
}

func TestAClosedEngineEndsThePublisher(t *testing.T) {
	p, messages := prepare(&script{failure: pagedllm.ErrClosed}, 2)
	if _, err := p.poll(); !errors.Is(err, pagedllm.ErrClosed) || len(*messages) != 0 {
		t.Error(err, *messages)
	}
}

// With the smallest capacity, an engine drops the events of nearly every step.
func TestBatchesOfAnEngineThatDropsEventsLeadToItsBlocks(t *testing.T) {
	options := pagedllm.Options{ModelPath: "../../../model", Threads: 1, KVBytes: 1 << 20,
		MaxModelLen: 256, KVEventsCapacity: 1}
	engine, err := pagedllm.Open(context.Background(), options)
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	p, messages := prepare(engine, 1000)
	for first := range 8 {
		tokens := make([]uint32, 200)
		for i := range tokens {
			tokens[i] = uint32(5 + (first*37+i*11)%1000)
		}
		request := pagedllm.Request{PromptTokenIDs: tokens, Sampling: pagedllm.Sampling{MaxTokens: 2}}
		if _, err := engine.Generate(context.Background(), request); err != nil {
			t.Fatal(err)
		}
		if _, err := p.poll(); err != nil {
			t.Fatal(err)
		}
		snapshot, err := engine.SnapshotKVEvents()
		if err != nil {
			t.Fatal(err)
		}
		for _, event := range snapshot[1:] {
			if _, ok := p.cached[event.Hash]; !ok {
				t.Errorf("prompt %d: a block is missing", first)
			}
		}
		if len(p.cached) != len(snapshot)-1 || len(snapshot) < 10 {
			t.Errorf("prompt %d: %d blocks instead of %d", first, len(p.cached), len(snapshot)-1)
		}
	}
	all := bytes.Join(slices.Concat(*messages...), nil)
	if !bytes.Contains(all, []byte("BlockRemoved")) || bytes.Contains(all, []byte("Cleared")) {
		t.Error("no block was removed, or all were")
	}
}

func TestNumbersHaveTheShortestForm(t *testing.T) {
	for value, want := range map[uint64]string{0: "00", 127: "7f", 128: "cc80", 255: "ccff",
		256: "cd0100", 65535: "cdffff", 65536: "ce00010000", math.MaxUint32: "ceffffffff",
		1 << 32: "cf0000000100000000"} {
		if text := hex.EncodeToString(appendUint(nil, value)); text != want {
			t.Errorf("%d: %s instead of %s", value, text, want)
		}
	}
	for count, want := range map[int]string{0: "90", 15: "9f", 16: "dc0010", 65535: "dcffff",
		65536: "dd00010000"} {
		if text := hex.EncodeToString(appendArray(nil, count)); text != want {
			t.Errorf("%d: %s instead of %s", count, text, want)
		}
	}
}

func TestBlocksOfASequenceAreOneEvent(t *testing.T) {
	otherGroup, longer, elsewhere := stored(1, 4, 3), stored(1, 5, 4), stored(1, 6, 5)
	otherGroup.Group, longer.Group, elsewhere.Group = 1, 1, 1
	longer.Tokens = []uint32{1, 2, 3}
	elsewhere.FirstToken++
	runs := join([]pagedllm.KVEvent{removed(1, 7), removed(1, 8), stored(1, 1, 0), stored(1, 2, 1),
		stored(1, 3, 1), otherGroup, longer, elsewhere, cleared(1), cleared(1)})
	var lengths []int
	for _, run := range runs {
		lengths = append(lengths, len(run))
	}
	if !slices.Equal(lengths, []int{2, 2, 1, 1, 1, 1, 1, 1}) {
		t.Error(lengths)
	}
}
