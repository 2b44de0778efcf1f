module github.com/libpagedllm/libpagedllm/examples/server-go

go 1.23

require github.com/libpagedllm/libpagedllm/bindings/go v0.0.0

replace github.com/libpagedllm/libpagedllm/bindings/go => ../../bindings/go
