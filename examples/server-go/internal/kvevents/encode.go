// Package kvevents publishes the KV events of engines in the format of vLLM
// (vllm/distributed/kv_events.py), so that routers made for vLLM can read them.
package kvevents

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// An Encoding selects one of the forms in which releases of vLLM write events.
type Encoding struct {
	// Arrays: events are arrays, and replies of the replay socket have no topic, as in vLLM until
	// 0.23. Otherwise, events are maps, and replies have the topic.
	Arrays bool
	// WholeHashes: hashes are 32 bytes. Otherwise, they are integers: the last 8 bytes, big-endian.
	WholeHashes bool
}

// medium is the name that vLLM gives the KV pool of an engine, on any kind of device.
const medium = "GPU"

// batch encodes the events of one step. The result is an EventBatch of vLLM: the time, the events
// and the rank of the engine among data-parallel engines.
func (e Encoding) batch(when time.Time, events []pagedllm.KVEvent) []byte {
	runs := join(events)
	out := appendArray(nil, 3)
	out = appendFloat(out, float64(when.UnixMicro())/1e6)
	out = appendArray(out, len(runs))
	for _, run := range runs {
		switch run[0].Kind {
		case pagedllm.KVStored:
			out = e.stored(out, run)
		case pagedllm.KVRemoved:
			out = e.removed(out, run)
		default:
			out = e.begin(out, "AllBlocksCleared", 0)
		}
	}
	return appendUint(out, 0)
}

// join divides events in runs that are one event of vLLM: the blocks of a sequence in their order,
// or removed blocks.
func join(events []pagedllm.KVEvent) (runs [][]pagedllm.KVEvent) {
	begin := 0
	for i := range events {
		if i > begin && !continues(&events[i-1], &events[i]) {
			runs = append(runs, events[begin:i])
			begin = i
		}
	}
	if begin < len(events) {
		runs = append(runs, events[begin:])
	}
	return runs
}

func continues(last, next *pagedllm.KVEvent) bool {
	if next.Kind != last.Kind || next.Group != last.Group {
		return false
	}
	switch next.Kind {
	case pagedllm.KVStored:
		return next.ParentHash == last.Hash && len(next.Tokens) == len(last.Tokens) &&
			next.FirstToken == last.FirstToken+len(last.Tokens)
	case pagedllm.KVRemoved:
		return true
	}
	return false
}

// begin appends the beginning of an event with a number of fields.
func (e Encoding) begin(out []byte, tag string, fields int) []byte {
	if e.Arrays {
		return appendString(appendArray(out, fields+1), tag)
	}
	return appendString(e.field(appendMap(out, fields+1), "type"), tag)
}

// field appends the name of the next value in a map.
func (e Encoding) field(out []byte, name string) []byte {
	if e.Arrays {
		return out
	}
	return appendString(out, name)
}

func (e Encoding) stored(out []byte, run []pagedllm.KVEvent) []byte {
	fields := 8
	if e.Arrays {
		fields++ // extra_keys, which a map does not need
	}
	out = e.begin(out, "BlockStored", fields)
	out = e.hashes(e.field(out, "block_hashes"), run)
	out = e.field(out, "parent_block_hash")
	if run[0].FirstToken == 0 {
		out = appendNil(out)
	} else {
		out = e.hash(out, run[0].ParentHash)
	}
	out = appendArray(e.field(out, "token_ids"), len(run)*len(run[0].Tokens))
	for i := range run {
		for _, token := range run[i].Tokens {
			out = appendUint(out, uint64(token))
		}
	}
	out = appendUint(e.field(out, "block_size"), uint64(len(run[0].Tokens)))
	out = appendNil(e.field(out, "lora_id"))
	out = appendString(e.field(out, "medium"), medium)
	out = appendNil(e.field(out, "lora_name"))
	if e.Arrays {
		out = appendNil(out)
	}
	return appendUint(e.field(out, "group_idx"), uint64(run[0].Group))
}

func (e Encoding) removed(out []byte, run []pagedllm.KVEvent) []byte {
	out = e.begin(out, "BlockRemoved", 3)
	out = e.hashes(e.field(out, "block_hashes"), run)
	out = appendString(e.field(out, "medium"), medium)
	return appendUint(e.field(out, "group_idx"), uint64(run[0].Group))
}

func (e Encoding) hashes(out []byte, run []pagedllm.KVEvent) []byte {
	out = appendArray(out, len(run))
	for i := range run {
		out = e.hash(out, run[i].Hash)
	}
	return out
}

func (e Encoding) hash(out []byte, hash pagedllm.KVHash) []byte {
	if e.WholeHashes {
		return append(append(out, 0xc4, byte(len(hash))), hash[:]...)
	}
	return appendUint(out, binary.BigEndian.Uint64(hash[len(hash)-8:]))
}

// The functions below append values of MessagePack (https://msgpack.org). Each uses the shortest
// form, as vLLM does.

func appendNil(out []byte) []byte { return append(out, 0xc0) }

func appendFloat(out []byte, value float64) []byte {
	return binary.BigEndian.AppendUint64(append(out, 0xcb), math.Float64bits(value))
}

func appendUint(out []byte, value uint64) []byte {
	switch {
	case value < 0x80:
		return append(out, byte(value))
	case value <= math.MaxUint8:
		return append(out, 0xcc, byte(value))
	case value <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(out, 0xcd), uint16(value))
	case value <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(out, 0xce), uint32(value))
	}
	return binary.BigEndian.AppendUint64(append(out, 0xcf), value)
}

// appendString appends a text of at most 31 bytes: the names in this file.
func appendString(out []byte, text string) []byte {
	return append(append(out, 0xa0|byte(len(text))), text...)
}

// appendMap appends the beginning of a map of at most 15 values.
func appendMap(out []byte, count int) []byte { return append(out, 0x80|byte(count)) }

func appendArray(out []byte, count int) []byte {
	switch {
	case count < 16:
		return append(out, 0x90|byte(count))
	case count <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(out, 0xdc), uint16(count))
	}
	return binary.BigEndian.AppendUint32(append(out, 0xdd), uint32(count))
}
