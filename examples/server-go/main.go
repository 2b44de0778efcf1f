// Serves models over HTTP with the APIs of OpenAI and Anthropic. docs/servers.md describes it.
//
// usage: server-go -model [NAME=]PATH [-model ...] [flags]
//
//	curl localhost:8080/v1/chat/completions -H 'Content-Type: application/json' \
//	    -d '{"messages": [{"role": "user", "content": "What is 7 + 5?"}]}'
package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/libpagedllm/libpagedllm/bindings/go"
	"github.com/libpagedllm/libpagedllm/examples/server-go/internal/server"
)

func main() {
	config, err := parseFlags(os.Args[1:])
	if err != nil {
		os.Exit(2) // the message has been printed
	}
	// The heap of Go is small beside the model, so that fewer collections cost little memory.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := run(config, log); err != nil {
		log.Error(err.Error())
		os.Exit(1)
	}
}

// run serves until SIGINT or SIGTERM. A second signal ends the process.
func run(config *config, log *slog.Logger) error {
	interrupted, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	models, err := openModels(interrupted, config, log)
	defer closeModels(models)
	if err != nil {
		return err
	}
	// The address is taken after the models are loaded, so that no client connects too early.
	listener, err := net.Listen("tcp", config.address)
	if err != nil {
		return err
	}
	options := config.server
	options.Log = log
	if config.traceEndpoint != "" {
		options.Exporter = server.NewExporter(config.traceEndpoint, log)
		defer options.Exporter.Close()
	}
	warnIfOpen(listener.Addr(), len(options.Keys) > 0, log)
	handler, err := server.New(models, options)
	if err != nil {
		return err
	}
	httpServer := &http.Server{
		Handler:           handler.Handler(),
		ReadHeaderTimeout: config.headerTimeout,
		// The timeout for a body that no endpoint reads, as after an error. Endpoints that read the
		// body set their own deadline, and streams have none.
		ReadTimeout:    config.headerTimeout + options.ReadTimeout,
		IdleTimeout:    config.idleTimeout,
		MaxHeaderBytes: 32 << 10,
		ErrorLog:       slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() { served <- httpServer.Serve(listener) }()
	log.Info("listening on http://" + listener.Addr().String())
	select {
	case err := <-served:
		return err
	case <-interrupted.Done():
	}
	stop() // a second signal is not caught
	return shutDown(httpServer, handler, models, config, log)
}

// shutDown takes no more requests, waits for those in progress, and ends the rest.
func shutDown(httpServer *http.Server, handler *server.Server, models []*server.Model, config *config, log *slog.Logger) error {
	log.Info("shutting down", "grace", config.grace)
	handler.Drain()
	grace, cancel := context.WithTimeout(context.Background(), config.grace)
	defer cancel()
	err := httpServer.Shutdown(grace)
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	log.Warn("ending the requests in progress")
	closeModels(models) // each request ends with an error, which its client receives
	last, cancelLast := context.WithTimeout(context.Background(), config.server.WriteTimeout)
	defer cancelLast()
	if httpServer.Shutdown(last) != nil {
		return httpServer.Close()
	}
	return nil
}

// openModels opens the engines. Their KV pools share one budget. It returns the models that are
// open also with an error.
func openModels(ctx context.Context, config *config, log *slog.Logger) (models []*server.Model, err error) {
	options := config.engine
	if options.MemoryFraction == 0 {
		if options.Budget, err = pagedllm.NewBudget(config.kvBytes, 0); err != nil {
			return nil, err
		}
		defer options.Budget.Close() // the engines keep it
	}
	for _, model := range config.models {
		options.ModelPath, options.ModelName = model.path, model.name
		engine, err := pagedllm.Open(ctx, options)
		if err != nil {
			return models, err
		}
		info := engine.ModelInfo()
		log.Info("loaded", "model", model.name, "architecture", info.Architecture, "max_model_len", info.MaxModelLen, "isa", info.ISA)
		models = append(models, &server.Model{Name: model.name, Engine: engine, Format: config.formats[model.name]})
	}
	return models, nil
}

func closeModels(models []*server.Model) {
	for _, model := range models {
		model.Engine.Close()
	}
}

// warnIfOpen warns if other machines can use the server without a key.
func warnIfOpen(address net.Addr, hasKeys bool, log *slog.Logger) {
	if tcp, ok := address.(*net.TCPAddr); ok && !tcp.IP.IsLoopback() && !hasKeys {
		log.Warn("the server has no API keys and is not limited to this machine; set -api-keys", "address", address.String())
	}
}
