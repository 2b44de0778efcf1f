package main

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"

	"github.com/libpagedllm/libpagedllm/examples/server-go/internal/kvevents"
	"github.com/libpagedllm/libpagedllm/examples/server-go/internal/server"
	"github.com/libpagedllm/libpagedllm/examples/server-go/internal/zmtp"
)

const (
	// kvEventsCapacity is the number of events that an engine keeps between two polls, which are
	// some milliseconds apart.
	kvEventsCapacity = 16384
	// maxEventClients is the maximum number of connections of each socket.
	maxEventClients = 64
	// maxQueuedEventBytes bounds the events that wait for one slow subscriber.
	maxQueuedEventBytes = 64 << 20
	modelPlaceholder    = "{model}"
)

// kvEventsConfig has the flags for KV events.
type kvEventsConfig struct {
	endpoint string // empty: no events
	replay   string
	topic    string
	format   string
	hashes   string
	batches  int
}

func (c *kvEventsConfig) addFlags(flags *flag.FlagSet) {
	flags.StringVar(&c.endpoint, "kv-events", "", "`endpoint` on which the KV events of all models "+
		"are published in vLLM's format, such as tcp://127.0.0.1:5557 (default: none)")
	flags.StringVar(&c.replay, "kv-events-replay", "", "`endpoint` that repeats KV events, such as "+
		"tcp://127.0.0.1:5558; further models have the following ports (default: none)")
	flags.StringVar(&c.topic, "kv-events-topic", modelPlaceholder, "`topic` of KV events; "+
		modelPlaceholder+" stands for the name of the model")
	flags.StringVar(&c.format, "kv-events-format", "map", "map: KV events are maps, as in vLLM 0.24 "+
		"and newer; array: arrays, as in older releases")
	flags.StringVar(&c.hashes, "kv-events-hashes", "int", "int: hashes of KV events are integers of "+
		"64 bits; bytes: they are 32 bytes")
	flags.IntVar(&c.batches, "kv-events-buffer", 10000, "number of past `batches` of KV events of "+
		"each model that are kept to be repeated")
}

func (c *kvEventsConfig) check(models int) error {
	if c.endpoint == "" {
		if c.replay != "" {
			return errors.New("-kv-events-replay needs -kv-events")
		}
		return nil
	}
	if _, err := eventAddress(c.endpoint, 0); err != nil {
		return fmt.Errorf("-kv-events: %w", err)
	}
	if c.replay != "" {
		if _, err := eventAddress(c.replay, models-1); err != nil {
			return fmt.Errorf("-kv-events-replay: %w", err)
		}
	}
	switch {
	case models > 1 && !strings.Contains(c.topic, modelPlaceholder):
		return fmt.Errorf("several models need topics of their own; write %s in -kv-events-topic",
			modelPlaceholder)
	case c.format != "map" && c.format != "array":
		return errors.New("-kv-events-format must be map or array")
	case c.hashes != "int" && c.hashes != "bytes":
		return errors.New("-kv-events-hashes must be int or bytes")
	case c.batches < 1:
		return errors.New("-kv-events-buffer must be positive")
	}
	return nil
}

// eventAddress returns the address of an endpoint, with a port that is larger by offset. Port 0
// stands for any free port, and stays 0.
func eventAddress(endpoint string, offset int) (string, error) {
	const form = "must be tcp://ADDRESS:PORT, or tcp://*:PORT for all addresses of the machine"
	rest, tcp := strings.CutPrefix(endpoint, "tcp://")
	host, portText, err := net.SplitHostPort(rest)
	if !tcp || err != nil || host == "" {
		return "", errors.New(form)
	}
	if host == "*" {
		host = ""
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil {
		return "", errors.New(form)
	}
	if port != 0 {
		port += uint64(offset)
	}
	if port > 65535 {
		return "", errors.New("the port of the last model exceeds 65535")
	}
	return net.JoinHostPort(host, strconv.FormatUint(port, 10)), nil
}

// kvEvents has the sockets and publishers of all models.
type kvEvents struct {
	publishers []*kvevents.Publisher
	routers    []*zmtp.Router
	pub        *zmtp.Pub
}

// startKVEvents starts to publish the events of all models. close ends it, also after an error.
func startKVEvents(models []*server.Model, config *config, log *slog.Logger) (*kvEvents, error) {
	k, c := new(kvEvents), &config.kvEvents
	if c.endpoint == "" {
		return k, nil
	}
	options := zmtp.Options{WriteTimeout: config.server.WriteTimeout,
		QueueBytes: maxQueuedEventBytes, Log: log}
	listener, err := listenForEvents(c.endpoint, 0)
	if err != nil {
		return k, err
	}
	k.pub = zmtp.NewPub(listener, options)
	public := !isLoopback(listener.Addr())
	for i, model := range models {
		topic := strings.ReplaceAll(c.topic, modelPlaceholder, model.Name)
		publisher := kvevents.Start(model.Engine, kvevents.Options{Topic: topic,
			Encoding: kvevents.Encoding{Arrays: c.format == "array",
				WholeHashes: c.hashes == "bytes"},
			Batches: c.batches, Send: k.pub.Publish, Log: log})
		k.publishers = append(k.publishers, publisher)
		replay := ""
		if c.replay != "" {
			other, err := listenForEvents(c.replay, i)
			if err != nil {
				return k, err
			}
			k.routers = append(k.routers, zmtp.NewRouter(other, options, publisher.Replay))
			replay = "tcp://" + other.Addr().String()
			public = public || !isLoopback(other.Addr())
		}
		log.Info("publishing KV events", "model", model.Name, "topic", topic, "endpoint",
			"tcp://"+listener.Addr().String(), "replay", replay)
	}
	if public {
		log.Warn("KV events contain the tokens of prompts, and any client that can connect to " +
			"their sockets reads them; limit the access to the ports")
	}
	return k, nil
}

func listenForEvents(endpoint string, offset int) (net.Listener, error) {
	address, err := eventAddress(endpoint, offset)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	return limitConnections(listener, maxEventClients), nil
}

// close ends the publishers before the engines are closed.
func (k *kvEvents) close() {
	for _, router := range k.routers {
		router.Close()
	}
	for _, publisher := range k.publishers {
		publisher.Close()
	}
	if k.pub != nil {
		k.pub.Close()
	}
}
