package pagedllm_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

func TestKVEventsGiveTheBlocksOfAPromptWithTheHashesOfHashPrompt(t *testing.T) {
	t.Parallel()
	engine := open(t, func(o *pagedllm.Options) { o.KVEventsCapacity = 1000 })
	tokens := make([]uint32, 48)
	for i := range tokens {
		tokens[i] = uint32(10 + i)
	}
	request := pagedllm.Request{PromptTokenIDs: tokens, Sampling: pagedllm.Sampling{MaxTokens: 2}}
	hashes, err := engine.HashPrompt(request, 0)
	if err != nil || len(hashes) != 3 {
		t.Fatalf("%d hashes, %v", len(hashes), err)
	}
	if _, err := engine.Generate(background, request); err != nil {
		t.Fatal(err)
	}
	var events []pagedllm.KVEvent
	eventually(t, "the events come", func() bool {
		more, err := engine.PollKVEvents()
		if err != nil {
			t.Fatal(err)
		}
		events = append(events, more...)
		return len(events) >= 3
	})
	for i, event := range events[:3] {
		if event.Kind != pagedllm.KVStored || event.Medium != pagedllm.KVMediumPool || event.Hash != hashes[i] ||
			event.FirstToken != 16*i || !slices.Equal(event.Tokens, tokens[16*i:][:16]) || time.Since(event.Time) > time.Hour {
			t.Errorf("event %d is %+v", i, event)
		}
		if i > 0 && event.ParentHash != hashes[i-1] {
			t.Errorf("event %d has another parent", i)
		}
	}
	all, err := engine.SnapshotKVEvents()
	if err != nil || all[0].Kind != pagedllm.KVCleared || all[0].Hash != (pagedllm.KVHash{}) || len(all) != len(events)+1 {
		t.Errorf("%d events of a snapshot, %v", len(all), err)
	}
	request.CacheSalt = []byte("tenant")
	if salted, err := engine.HashPrompt(request, 0); err != nil || slices.Contains(salted, hashes[0]) {
		t.Errorf("the salt changes no hash, %v", err)
	}
	for _, group := range []int{1, -1} {
		if _, err := engine.HashPrompt(request, group); !errors.Is(err, pagedllm.ErrInvalidArgument) {
			t.Errorf("group %d: %v", group, err)
		}
	}
}

func TestKVEventsOfAnEngineWithoutThemReturnErrUnsupported(t *testing.T) {
	t.Parallel()
	engine := open(t)
	if _, err := engine.PollKVEvents(); !errors.Is(err, pagedllm.ErrUnsupported) {
		t.Error(err)
	}
	if _, err := engine.SnapshotKVEvents(); !errors.Is(err, pagedllm.ErrUnsupported) {
		t.Error(err)
	}
}
