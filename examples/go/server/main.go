// Serves answers over HTTP as Server-Sent Events. If a client disconnects, its request is aborted.
//
// usage: server MODEL_DIR [ADDRESS]
//
//	curl -N 'localhost:8080/ask?question=What+is+the+capital+of+France?'
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// An event is the part of an output that a client receives. FinishReason is "none" until the
// last event.
type event struct {
	Text         string `json:"text"`
	FinishReason string `json:"finish_reason"`
	Error        string `json:"error,omitempty"`
}

// ask answers GET /ask?question=...
func ask(engine *pagedllm.Engine) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		prompt, err := engine.RenderChat([]pagedllm.Message{{Role: "user", Content: r.FormValue("question")}})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for output, err := range engine.Stream(r.Context(), pagedllm.Request{Prompt: prompt, RawPrompt: true}) {
			next := event{Text: output.Text, FinishReason: output.FinishReason.String()}
			if err != nil {
				next.Error = err.Error()
			}
			if send(w, next) != nil {
				return // aborts the request
			}
		}
	}
}

func send(w http.ResponseWriter, next event) error {
	data, err := json.Marshal(next)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(w, "data: %s\n\n", data); err != nil {
		return err
	}
	return http.NewResponseController(w).Flush()
}

func main() {
	if len(os.Args) < 2 {
		log.Fatal("usage: server MODEL_DIR [ADDRESS]")
	}
	address := append(os.Args[2:], "localhost:8080")[0]
	interrupted, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	engine, err := pagedllm.Open(interrupted, pagedllm.Options{ModelPath: os.Args[1]})
	if err != nil {
		log.Fatal(err)
	}
	server := http.Server{Addr: address, Handler: ask(engine)}
	context.AfterFunc(interrupted, func() {
		engine.Close() // ends every stream
		server.Close()
	})
	log.Printf("listening on http://%s/ask?question=...", address)
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		log.Fatal(err)
	}
}
