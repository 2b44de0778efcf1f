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
	"flag"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
	"github.com/libpagedllm/libpagedllm/examples/server-go/internal/server"
)

func main() {
	config, err := parseFlags(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		os.Exit(2) // the message has been printed
	}
	// The heap of Go is small beside the model, so that fewer collections cost little memory. If
	// large answers make it grow, the usual number of collections bounds it.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(heapLimit)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := run(config, log); err != nil {
		log.Error(err.Error())
		os.Exit(1)
	}
}

// heapLimit is a soft limit in bytes for the memory of Go, which the models do not use.
const heapLimit = 2 << 30

// run serves until SIGINT or SIGTERM. A second signal ends the process.
func run(config *config, log *slog.Logger) error {
	interrupted, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	models, err := openModels(interrupted, config, log)
	defer closeModels(models)
	if err != nil {
		return err
	}
	events, err := startKVEvents(models, config, log)
	defer events.close()
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
	if len(options.Keys) == 0 {
		options.LocalHostsOnly = isLoopback(listener.Addr())
		if !options.LocalHostsOnly {
			log.Warn("the server has no API keys and is not limited to this machine; set -api-keys",
				"address", listener.Addr().String())
		}
	}
	handler, err := server.New(models, options)
	if err != nil {
		return err
	}
	httpServer := newHTTPServer(config, handler.Handler(), log)
	served := make(chan error, 1)
	go func() { served <- httpServer.Serve(limitConnections(listener, config.maxConnections)) }()
	log.Info("listening on http://" + listener.Addr().String())
	select {
	case err := <-served:
		return err
	case <-interrupted.Done():
	}
	stop() // a second signal is not caught
	log.Info("shutting down", "drain", config.drain, "grace", config.grace)
	handler.Drain()
	select { // load balancers notice that /health fails, and choose another server
	case err := <-served:
		return err
	case <-time.After(config.drain):
	}
	return shutDown(httpServer, models, config, log)
}

func newHTTPServer(config *config, handler http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: config.headerTimeout,
		// The timeout for a body that no endpoint reads, as after an error. Endpoints that read the
		// body set their own deadline, and streams have none.
		ReadTimeout:    config.headerTimeout + config.server.ReadTimeout,
		IdleTimeout:    config.idleTimeout,
		MaxHeaderBytes: 32 << 10,
		ErrorLog:       slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}

// shutDown accepts no more connections, waits for those in progress, and ends the rest.
func shutDown(httpServer *http.Server, models []*server.Model, config *config,
	log *slog.Logger) error {
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
func openModels(ctx context.Context, config *config, log *slog.Logger) (
	models []*server.Model, err error) {
	options := config.engine
	if config.kvEvents.endpoint != "" {
		options.KVEventsCapacity = kvEventsCapacity
	}
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
		log.Info("loaded", "model", model.name, "architecture", info.Architecture, "max_model_len",
			info.MaxModelLen, "isa", info.ISA)
		models = append(models, &server.Model{Name: model.name, Engine: engine,
			Format: config.formats[model.name]})
	}
	return models, nil
}

func closeModels(models []*server.Model) {
	for _, model := range models {
		model.Engine.Close()
	}
}

func isLoopback(address net.Addr) bool {
	tcp, ok := address.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}
