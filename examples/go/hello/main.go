// Streams the answers to three prompts at once. The second request is aborted after a few tokens.
// usage: hello MODEL_DIR
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func ask(engine *pagedllm.Engine, question string) pagedllm.RequestID {
	prompt := must(engine.RenderChat([]pagedllm.Message{{Role: "user", Content: question}}))
	greedy := pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0)}
	id := must(engine.Queue().Add(pagedllm.Request{Prompt: prompt, RawPrompt: true, Sampling: greedy}))
	fmt.Printf("[%d] %s\n", id, question)
	return id
}

func main() {
	// For the same order of outputs in every run.
	options := pagedllm.Options{ModelPath: "examples/model", HostSteps: true}
	if len(os.Args) > 1 {
		options.ModelPath = os.Args[1]
	}
	engine := must(pagedllm.Open(context.Background(), options))
	defer engine.Close()
	ask(engine, "What is the capital of France?")
	story := ask(engine, "Tell me a short story.")
	ask(engine, "What is 7 + 5?")
	for unfinished := 3; unfinished > 0; {
		unfinished = must(engine.Step()).Unfinished
		for _, output := range must(engine.Queue().TryPoll()) {
			end := ""
			if output.FinishReason != pagedllm.FinishNone {
				end = fmt.Sprintf(" (%v)", output.FinishReason)
			}
			fmt.Printf("[%d] %s%s\n", output.Request, output.Text, end)
			if output.Request == story && output.GeneratedTokens == 8 && end == "" {
				if err := engine.Abort(story); err != nil {
					log.Fatal(err)
				}
			}
		}
	}
}
