// Package server has the parts of an HTTP server that do not depend on an endpoint: the strict
// reading of JSON bodies, the sampling parameters, and the error objects of OpenAI and Anthropic.
package server

import "time"

// Options are the limits of a server.
type Options struct {
	// MaxBodyBytes is the maximum length of the body of a request in bytes.
	MaxBodyBytes int64
	// ReadTimeout is the time within which the body of a request must arrive.
	ReadTimeout time.Duration
}

// A Server answers HTTP requests.
type Server struct{ options Options }
