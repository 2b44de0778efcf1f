//! Parses tokens to a syntax tree: statements. Expressions are in `expressions.rs`.

mod expressions;

use std::collections::HashMap;

use super::ast::{Arguments, Expr, ExprId, Extras, For, MacroDef, Modifier, Name, Statement, StatementKind, Target, Tree};
use super::failure::{Failure, Result};
use super::lexer::{Spanned, Token, tokenize};
use super::{MAX_BLOCK_DEPTH, MAX_EXPRESSION_DEPTH, MAX_NAMES, MAX_SOURCE, filters, tests};

pub fn parse(source: &str) -> Result<Tree> {
    if source.len() > MAX_SOURCE {
        let message = format!("the template is too long ({} bytes, at most {MAX_SOURCE}); shorten it", source.len());
        return Err(Failure::limit(message));
    }
    let mut parser = Parser { tokens: tokenize(source)?, ..Parser::default() };
    let body = parser.statements(&[]).map_err(|e| e.at(parser.line()))?;
    let names = parser.tree.names.len();
    if names > MAX_NAMES {
        return Err(Failure::limit(format_args!("the template has too many names ({names}, at most {MAX_NAMES}); use a dictionary")));
    }
    Ok(Tree { body, ..parser.tree })
}

#[derive(Default)]
struct Parser {
    tokens: Vec<Spanned>,
    next: usize,
    tree: Tree,
    names: HashMap<String, Name>,
    /// Depth of each expression's tree.
    depths: Vec<u16>,
    /// Depth of the parser's recursion in an expression.
    recursion: usize,
    blocks: usize,
    loops: usize,
    /// Names that the bodies of the surrounding macros read.
    macros: Vec<Extras>,
    /// True directly in a branch of an `if`, where an unknown filter fails only when it is reached.
    in_branch: bool,
}

impl Parser {
    fn peek(&self) -> &Token {
        self.tokens.get(self.next).map_or(&Token::End, |spanned| &spanned.token)
    }

    fn peek_second(&self) -> &Token {
        self.tokens.get(self.next + 1).map_or(&Token::End, |spanned| &spanned.token)
    }

    fn line(&self) -> u32 {
        self.tokens.get(self.next).or(self.tokens.last()).map_or(1, |spanned| spanned.line)
    }

    fn advance(&mut self) -> Token {
        let token = self.peek().clone();
        self.next += 1;
        token
    }

    fn at_symbol(&self, symbol: &str) -> bool {
        matches!(self.peek(), Token::Symbol(found) if *found == symbol)
    }

    fn at_word(&self, word: &str) -> bool {
        matches!(self.peek(), Token::Name(found) if found == word)
    }

    fn skip_symbol(&mut self, symbol: &str) -> bool {
        let found = self.at_symbol(symbol);
        self.next += usize::from(found);
        found
    }

    fn skip_word(&mut self, word: &str) -> bool {
        let found = self.at_word(word);
        self.next += usize::from(found);
        found
    }

    fn expect_symbol(&mut self, symbol: &str) -> Result<()> {
        if self.skip_symbol(symbol) { Ok(()) } else { self.unexpected(&format!("'{symbol}'")) }
    }

    fn expect_word(&mut self, word: &str) -> Result<()> {
        if self.skip_word(word) { Ok(()) } else { self.unexpected(&format!("'{word}'")) }
    }

    fn expect(&mut self, token: &Token, described: &str) -> Result<()> {
        if self.peek() == token {
            self.next += 1;
            return Ok(());
        }
        self.unexpected(described)
    }

    fn expect_name(&mut self) -> Result<String> {
        match self.peek() {
            Token::Name(_) => match self.advance() {
                Token::Name(name) => Ok(name),
                _ => self.unexpected("a name"),
            },
            _ => self.unexpected("a name"),
        }
    }

    fn unexpected<T>(&self, expected: &str) -> Result<T> {
        Err(Failure::new(format_args!("unexpected {}, expected {expected}", describe(self.peek()))).at(self.line()))
    }

    fn fail<T>(&self, message: impl std::fmt::Display) -> Result<T> {
        Err(Failure::new(message).at(self.line()))
    }

    fn intern(&mut self, name: &str) -> Name {
        if let Some(&known) = self.names.get(name) {
            return known;
        }
        let new = Name(self.tree.names.len() as u32);
        self.tree.names.push(name.to_string());
        self.names.insert(name.to_string(), new);
        new
    }

    /// Parses statements up to a tag of `ends`, which is not consumed, or to the end of the
    /// template.
    fn statements(&mut self, ends: &[&str]) -> Result<Vec<Statement>> {
        let mut body = Vec::new();
        loop {
            let line = self.line();
            match self.peek() {
                Token::End if ends.is_empty() => return Ok(body),
                Token::End => return self.fail(format_args!("unexpected end of template, expected {}", ends.join(" or "))),
                Token::Text(_) => {
                    if let Token::Text(text) = self.advance() {
                        body.push(Statement { line, kind: StatementKind::Text(text) });
                    }
                }
                Token::VariableBegin => {
                    self.next += 1;
                    let value = self.tuple(true, &[])?;
                    self.expect(&Token::VariableEnd, "the end of the expression")?;
                    body.push(Statement { line, kind: StatementKind::Print(value) });
                }
                Token::BlockBegin => {
                    if matches!(self.peek_second(), Token::Name(name) if ends.contains(&name.as_str())) {
                        return Ok(body);
                    }
                    self.next += 1;
                    let line = self.line();
                    let kind = self.statement().map_err(|e| e.at(line))?;
                    self.expect(&Token::BlockEnd, "the end of the block")?;
                    body.extend(kind.map(|kind| Statement { line, kind }));
                }
                _ => return self.unexpected("text or a tag"),
            }
        }
    }

    /// Parses the body of a block, from the end of its tag to one of `ends`, whose name is
    /// returned.
    fn body(&mut self, ends: &[&str]) -> Result<(Vec<Statement>, String)> {
        self.skip_symbol(":");
        self.expect(&Token::BlockEnd, "the end of the block")?;
        self.blocks += 1;
        if self.blocks > MAX_BLOCK_DEPTH {
            let message = format!("blocks are nested too deep (at most {MAX_BLOCK_DEPTH} levels); use macros");
            return Err(Failure::limit(message).at(self.line()));
        }
        let body = self.statements(ends)?;
        self.blocks -= 1;
        self.next += 1;
        Ok((body, self.expect_name()?))
    }

    /// Parses a body whose statements are not directly in a branch of an `if`.
    fn scope_body(&mut self, ends: &[&str]) -> Result<(Vec<Statement>, String)> {
        let outer = std::mem::replace(&mut self.in_branch, false);
        let body = self.body(ends);
        self.in_branch = outer;
        body
    }

    fn statement(&mut self) -> Result<Option<StatementKind>> {
        let name = self.expect_name()?;
        Ok(Some(match name.as_str() {
            "if" => self.if_statement()?,
            "for" => self.for_statement()?,
            "set" => self.set_statement()?,
            "with" => self.with_statement()?,
            "macro" => self.macro_statement()?,
            "call" => self.call_block()?,
            "filter" => {
                let filters = self.filter_chain(true)?;
                let (body, _) = self.scope_body(&["endfilter"])?;
                StatementKind::FilterBlock { filters, body }
            }
            "print" => return self.print_statement(),
            "generation" => self.scope(&["endgeneration"], false)?,
            "autoescape" => {
                self.expression()?;
                self.scope(&["endautoescape"], false)?
            }
            "block" => self.block_statement()?,
            "break" | "continue" if self.loops == 0 => return self.fail(format_args!("'{name}' outside loop")),
            "break" => StatementKind::Break,
            "continue" => StatementKind::Continue,
            "include" | "import" | "from" | "extends" => self.needs_loader(&name)?,
            _ => return self.fail(format_args!("unknown tag '{name}'")),
        }))
    }

    fn scope(&mut self, ends: &[&str], from_root: bool) -> Result<StatementKind> {
        let (body, _) = self.scope_body(ends)?;
        Ok(StatementKind::Scope { from_root, body })
    }

    fn if_statement(&mut self) -> Result<StatementKind> {
        let outer = std::mem::replace(&mut self.in_branch, true);
        let mut branches = Vec::new();
        let mut otherwise = Vec::new();
        loop {
            let test = self.tuple(false, &[])?;
            let (body, end) = self.body(&["elif", "else", "endif"])?;
            branches.push((test, body));
            if end == "else" {
                otherwise = self.body(&["endif"])?.0;
            }
            if end != "elif" {
                break;
            }
        }
        self.in_branch = outer;
        Ok(StatementKind::If { branches, otherwise })
    }

    fn for_statement(&mut self) -> Result<StatementKind> {
        let target = self.target(false, &["in"])?;
        if names_of(&target).any(|name| self.tree.name(name) == "loop") {
            return self.fail("cannot assign to the special variable 'loop'");
        }
        self.expect_word("in")?;
        let iterable = self.tuple(false, &["recursive"])?;
        let condition = if self.skip_word("if") { Some(self.expression()?) } else { None };
        let recursive = self.skip_word("recursive");
        self.loops += 1;
        let (body, end) = self.scope_body(&["endfor", "else"])?;
        self.loops -= 1;
        let otherwise = if end == "else" { self.scope_body(&["endfor"])?.0 } else { Vec::new() };
        Ok(StatementKind::For(Box::new(For { target, iterable, condition, recursive, body, otherwise })))
    }

    fn set_statement(&mut self) -> Result<StatementKind> {
        let target = self.target(true, &[])?;
        if self.skip_symbol("=") {
            return Ok(StatementKind::Set { target, value: self.tuple(true, &[])? });
        }
        let filters = self.filter_chain(false)?;
        let (body, _) = self.scope_body(&["endset"])?;
        Ok(StatementKind::SetBlock { target, filters, body })
    }

    fn with_statement(&mut self) -> Result<StatementKind> {
        let mut assignments = Vec::new();
        while *self.peek() != Token::BlockEnd {
            if !assignments.is_empty() {
                self.expect_symbol(",")?;
            }
            let target = self.target(false, &[])?;
            self.expect_symbol("=")?;
            assignments.push((target, self.expression()?));
        }
        let (body, _) = self.scope_body(&["endwith"])?;
        Ok(StatementKind::With { assignments, body })
    }

    fn macro_statement(&mut self) -> Result<StatementKind> {
        let name = self.expect_name()?;
        let name = self.intern(&name);
        let (parameters, defaults) = self.signature()?;
        Ok(StatementKind::Macro(self.macro_body(Some(name), parameters, defaults, "endmacro")?))
    }

    fn call_block(&mut self) -> Result<StatementKind> {
        let (parameters, defaults) = if self.at_symbol("(") { self.signature()? } else { Default::default() };
        let call = self.expression()?;
        if !matches!(self.tree.expr(call), Expr::Call(..)) {
            return self.fail("expected a call");
        }
        let caller = self.macro_body(None, parameters, defaults, "endcall")?;
        // The call is no longer part of the tree: its parts move to the statement.
        match std::mem::replace(&mut self.tree.expressions[call.0 as usize], Expr::Tuple(Vec::new())) {
            Expr::Call(callee, arguments) => Ok(StatementKind::CallBlock { caller, callee, arguments }),
            _ => self.fail("expected a call"),
        }
    }

    fn macro_body(&mut self, name: Option<Name>, parameters: Vec<Name>, defaults: Vec<ExprId>, end: &str) -> Result<usize> {
        self.macros.push(Extras::default());
        // `break` in a macro does not leave the loop around it.
        let loops = std::mem::replace(&mut self.loops, 0);
        let (body, _) = self.scope_body(&[end])?;
        self.loops = loops;
        let mut takes = self.macros.pop().unwrap_or_default();
        let declares = |special: &str| parameters.iter().any(|&name| self.tree.name(name) == special);
        if takes.caller && declares("caller") && parameters.len() > defaults.len() {
            let first_default = parameters.len() - defaults.len();
            if parameters[..first_default].iter().any(|&name| self.tree.name(name) == "caller") {
                return self.fail("the parameter 'caller' of a macro needs a default");
            }
        }
        takes.caller &= !declares("caller");
        takes.varargs &= !declares("varargs");
        takes.kwargs &= !declares("kwargs");
        self.tree.macros.push(MacroDef { name, parameters, defaults, body, takes });
        Ok(self.tree.macros.len() - 1)
    }

    fn signature(&mut self) -> Result<(Vec<Name>, Vec<ExprId>)> {
        let (mut parameters, mut defaults) = (Vec::new(), Vec::new());
        self.expect_symbol("(")?;
        while !self.skip_symbol(")") {
            if !parameters.is_empty() {
                self.expect_symbol(",")?;
            }
            let name = self.expect_name()?;
            parameters.push(self.intern(&name));
            if self.skip_symbol("=") {
                defaults.push(self.expression()?);
            } else if !defaults.is_empty() {
                return self.fail("non-default argument follows default argument");
            }
        }
        Ok((parameters, defaults))
    }

    /// Parses `{% print a, b %}`, which prints several values like a concatenation.
    fn print_statement(&mut self) -> Result<Option<StatementKind>> {
        let mut values = Vec::new();
        while *self.peek() != Token::BlockEnd {
            if !values.is_empty() {
                self.expect_symbol(",")?;
            }
            values.push(self.expression()?);
        }
        if values.is_empty() {
            return Ok(None);
        }
        Ok(Some(StatementKind::Print(self.add(Expr::Concat(values))?)))
    }

    fn block_statement(&mut self) -> Result<StatementKind> {
        let name = self.expect_name()?;
        let scoped = self.skip_word("scoped");
        self.skip_word("required");
        let (body, _) = self.scope_body(&["endblock"])?;
        self.skip_word(&name);
        Ok(StatementKind::Scope { from_root: !scoped, body })
    }

    fn needs_loader(&mut self, name: &str) -> Result<StatementKind> {
        while !matches!(self.peek(), Token::BlockEnd | Token::End) {
            self.next += 1;
        }
        let name = ["include", "import", "from"].into_iter().find(|known| *known == name);
        Ok(StatementKind::NeedsLoader(name.unwrap_or("extends")))
    }

    /// Parses a filter without a value before it, and further filters after `|`.
    fn filter_chain(&mut self, starts_inline: bool) -> Result<Vec<Modifier>> {
        let mut filters = Vec::new();
        let mut inline = starts_inline;
        while inline || self.skip_symbol("|") {
            inline = false;
            filters.push(self.modifier_filter()?);
        }
        Ok(filters)
    }

    fn modifier_filter(&mut self) -> Result<Modifier> {
        let name = self.dotted_name()?;
        if !self.in_branch && !filters::exists(&name) {
            return self.fail(format_args!("no filter named '{name}'"));
        }
        let arguments = if self.at_symbol("(") { self.arguments()? } else { Arguments::default() };
        Ok(Modifier { name, arguments })
    }

    fn check_test(&self, name: &str) -> Result<()> {
        if !self.in_branch && !tests::exists(name) {
            return self.fail(format_args!("no test named '{name}'"));
        }
        Ok(())
    }

    fn dotted_name(&mut self) -> Result<String> {
        let mut name = self.expect_name()?;
        while self.skip_symbol(".") {
            name.push('.');
            name.push_str(&self.expect_name()?);
        }
        Ok(name)
    }

    /// Parses the target of an assignment.
    fn target(&mut self, with_attributes: bool, ends: &[&str]) -> Result<Target> {
        let mut targets = Vec::new();
        let mut is_tuple = false;
        loop {
            let ended = matches!(self.peek(), Token::VariableEnd | Token::BlockEnd) || self.at_symbol(")");
            if ended || ends.iter().any(|end| self.at_word(end)) {
                break;
            }
            targets.push(self.single_target(with_attributes)?);
            if !self.skip_symbol(",") {
                break;
            }
            is_tuple = true;
        }
        match targets.pop() {
            None => self.unexpected("a name to assign to"),
            Some(target) if !is_tuple && targets.is_empty() => Ok(target),
            Some(target) => {
                targets.push(target);
                Ok(Target::Tuple(targets))
            }
        }
    }

    fn single_target(&mut self, with_attributes: bool) -> Result<Target> {
        if self.skip_symbol("(") {
            self.enter()?;
            let target = self.target(with_attributes, &[])?;
            self.recursion -= 1;
            self.expect_symbol(")")?;
            return Ok(target);
        }
        let name = self.expect_name()?;
        if ["true", "false", "none", "True", "False", "None"].contains(&name.as_str()) {
            return self.fail(format_args!("cannot assign to '{name}'"));
        }
        let name = self.intern(&name);
        if with_attributes && self.skip_symbol(".") {
            return Ok(Target::Attribute(name, self.expect_name()?));
        }
        Ok(Target::Name(name))
    }

    fn enter(&mut self) -> Result<()> {
        self.recursion += 1;
        if self.recursion > MAX_EXPRESSION_DEPTH {
            return Err(too_deep().at(self.line()));
        }
        Ok(())
    }
}

fn too_deep() -> Failure {
    Failure::limit(format_args!("an expression is nested or chained too deep (at most {MAX_EXPRESSION_DEPTH} levels); split it with 'set'"))
}

fn names_of(target: &Target) -> Box<dyn Iterator<Item = Name> + '_> {
    match target {
        Target::Name(name) => Box::new(std::iter::once(*name)),
        Target::Attribute(..) => Box::new(std::iter::empty()),
        Target::Tuple(targets) => Box::new(targets.iter().flat_map(names_of)),
    }
}

fn describe(token: &Token) -> String {
    match token {
        Token::Text(_) => "text".into(),
        Token::VariableBegin => "'{{'".into(),
        Token::VariableEnd => "'}}'".into(),
        Token::BlockBegin => "'{%'".into(),
        Token::BlockEnd => "'%}'".into(),
        Token::Name(name) => format!("'{name}'"),
        Token::Str(_) => "a string".into(),
        Token::Int(_) | Token::Float(_) => "a number".into(),
        Token::Symbol(symbol) => format!("'{symbol}'"),
        Token::End => "end of template".into(),
    }
}
