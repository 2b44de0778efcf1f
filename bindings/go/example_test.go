package pagedllm_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// The model of the repository.
var options = pagedllm.Options{ModelPath: "../../examples/model", KVBytes: 16 << 20}

func Example() {
	engine, err := pagedllm.Open(context.Background(), options)
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	prompt, err := engine.RenderChat([]pagedllm.Message{{Role: "user", Content: "What is the capital of France?"}})
	if err != nil {
		log.Fatal(err)
	}
	answer, err := engine.Generate(context.Background(), pagedllm.Request{
		Prompt:    prompt,
		RawPrompt: true,
		Sampling:  pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0)},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(answer.Text)
	// Output: The capital of France is Paris.
}

func ExampleOpen() {
	withProgress := options
	var loaded int64
	withProgress.Progress = func(done, total int64) { loaded = done }
	engine, err := pagedllm.Open(context.Background(), withProgress)
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	fmt.Println(loaded, "bytes are loaded")
	fmt.Println(engine.ModelInfo().Architecture)
	// Output:
	// 5242880 bytes are loaded
	// LlamaForCausalLM
}

func ExampleOptions_Plan() {
	plan, err := options.Plan()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d blocks of %d tokens, %d MiB of KV\n", plan.Blocks, plan.BlockSize, plan.KVBytes>>20)
	// Output: 512 blocks of 16 tokens, 16 MiB of KV
}

func ExampleEngine_Stream() {
	engine, err := pagedllm.Open(context.Background(), options)
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	prompt, err := engine.RenderChat([]pagedllm.Message{{Role: "user", Content: "Count from 1 to 10."}})
	if err != nil {
		log.Fatal(err)
	}
	request := pagedllm.Request{Prompt: prompt, RawPrompt: true, Sampling: pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0)}}
	for output, err := range engine.Stream(context.Background(), request) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(output.Text)
		if output.GeneratedTokens == 7 {
			break // aborts the request
		}
	}
	// Output: 1, 2, 3
}

func ExampleEngine_Generate_timeout() {
	engine, err := pagedllm.Open(context.Background(), options)
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 0)
	defer cancel()
	_, err = engine.Generate(ctx, pagedllm.Request{Prompt: "Once upon a time"})
	fmt.Println(errors.Is(err, context.DeadlineExceeded))
	// Output: true
}

// Two forks continue one conversation. Their common tokens are computed once.
func ExampleSequence_Fork() {
	engine, err := pagedllm.Open(context.Background(), options)
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	prompt, err := engine.RenderChat([]pagedllm.Message{{Role: "user", Content: "What is the capital of France?"}})
	if err != nil {
		log.Fatal(err)
	}
	greedy := pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0)}
	answer, err := engine.Generate(context.Background(), pagedllm.Request{Prompt: prompt, RawPrompt: true, Sampling: greedy, Keep: true})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(answer.Text)
	trunk := engine.Sequence(answer.Sequence)
	defer trunk.Close()
	for _, question := range []string{"What does a cow say?", "What is 7 + 5?"} {
		branch, err := trunk.Fork(pagedllm.Fork{Queue: engine.Queue()})
		if err != nil {
			log.Fatal(err)
		}
		defer branch.Close()
		turn, err := engine.Tokenize("<|user|>\n"+question+"<|end|>\n<|assistant|>\n", false)
		if err != nil {
			log.Fatal(err)
		}
		if err := branch.Append(turn); err != nil {
			log.Fatal(err)
		}
		answer, err := branch.Generate(context.Background(), pagedllm.Resume{Sampling: greedy})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(answer.Text)
	}
	// Output:
	// The capital of France is Paris.
	// A cow says moo.
	// 12
}

// The host steps the engine.
func ExampleEngine_Step() {
	hostSteps := options
	hostSteps.HostSteps = true
	engine, err := pagedllm.Open(context.Background(), hostSteps)
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	queue := engine.Queue()
	greedy := pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0), MaxTokens: 4}
	if _, err := queue.Add(pagedllm.Request{Prompt: "Once upon", Sampling: greedy}); err != nil {
		log.Fatal(err)
	}
	for unfinished := 1; unfinished > 0; {
		report, err := engine.Step()
		if err != nil {
			log.Fatal(err)
		}
		unfinished = report.Unfinished
		outputs, err := queue.TryPoll()
		if err != nil {
			log.Fatal(err)
		}
		for _, output := range outputs {
			fmt.Println(output.GeneratedTokens, output.FinishReason)
		}
	}
	// Output:
	// 1 none
	// 2 none
	// 3 none
	// 4 length
}

// One goroutine serves many requests and distinguishes them by UserData.
func ExampleQueue_Poll() {
	engine, err := pagedllm.Open(context.Background(), options)
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	queue, err := engine.NewQueue(1000)
	if err != nil {
		log.Fatal(err)
	}
	defer queue.Close()
	for i := range 3 {
		request := pagedllm.Request{Prompt: "Once", UserData: uint64(i), Sampling: pagedllm.Sampling{MaxTokens: 5, IgnoreEOS: true}}
		if _, err := queue.Add(request); err != nil {
			log.Fatal(err)
		}
	}
	tokens := make([]int, 3)
	for left := 3; left > 0; {
		outputs, err := queue.Poll(context.Background())
		if err != nil {
			log.Fatal(err)
		}
		for _, output := range outputs {
			tokens[output.UserData] += len(output.Tokens)
			if output.FinishReason != pagedllm.FinishNone {
				left--
			}
		}
	}
	fmt.Println(tokens)
	// Output: [5 5 5]
}

func ExampleError() {
	_, err := pagedllm.Open(context.Background(), pagedllm.Options{ModelPath: "no/such/model"})
	fmt.Println(errors.Is(err, pagedllm.ErrIO))
	fmt.Println(err)
	// Output:
	// true
	// pagedllm: i/o: model_path "no/such/model" does not exist or is not a directory
}
